//! Antialiased bicubic resize of 8-bit pixels, in the bits of PyTorch on a CPU.
//!
//! PyTorch filters rows first, then columns, and rounds to 8 bits in between. Each output pixel is a sum of products
//! with 16-bit fixed-point weights, plus one half, shifted and clamped. Its AVX2 and its portable kernel agree in
//! every bit (measured on torch 2.13 over thousands of sizes), so there is one reference. All sums are exact in 32
//! bits, so that their order is free: that is what the vector versions live on.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
pub(super) mod scalar;
mod weights;

pub(super) use weights::{Weights, Window};

//! Antialiased bicubic resize of 8-bit pixels, in the bits of PyTorch on a CPU.
//!
//! PyTorch filters rows first, then columns, and rounds to 8 bits in between. Each output pixel is a sum of products
//! with 16-bit fixed-point weights, plus one half, shifted and clamped. Its AVX2 and its portable kernel agree in
//! every bit (measured on torch 2.13 over thousands of sizes), so there is one reference.

pub(super) mod scalar;
mod weights;

pub(super) use weights::Weights;

//! Antialiased resize of 8-bit pixels, in the bits of PyTorch or of Pillow on a CPU.
//!
//! Both filter rows first, then columns, and round to 8 bits in between. Each output pixel is a sum
//! of products with fixed-point weights, plus one half, shifted and clamped. PyTorch's weights have
//! 16 bits (`i16`), Pillow's 22 behind the point (`i32`). PyTorch's AVX2 and its portable kernel
//! agree in every bit (measured on torch 2.13 over thousands of sizes), so there is one reference.
//! All sums are exact in 32 bits, so that their order is free: that is what the vector versions
//! live on.
//!
//! | module | holds |
//! |---|---|
//! | `filters`, `fixed_point` | the filters; numbers that weights are rounded to |
//! | `weights` | for each output pixel its inputs and their weights |
//! | `halves` | weights as 16-bit numbers, for AVX2 and NEON |
//! | `bytes`, `lanes` | weights as bytes, and which input bytes they go with, for AVX-512 |
//! | `scalar`, `avx2`, `avx512`, `neon` | both passes |

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for AVX-512"))]
mod bytes;
mod filters;
mod fixed_point;
mod halves;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "for AVX-512"))]
mod lanes;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod neon;
pub(super) mod scalar;
mod weights;

pub(crate) use filters::Filter;
pub(super) use fixed_point::FixedPoint;
pub(super) use weights::Weights;

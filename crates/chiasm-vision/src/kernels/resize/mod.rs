//! Antialiased resize of 8-bit pixels, with the same bits as PyTorch or Pillow on a CPU.
//!
//! Both libraries filter rows first, then columns, and round to 8 bits in between. Each output
//! pixel is a sum of products with fixed-point weights, plus one half, shifted and clamped.
//! PyTorch's weights have 16 bits (`i16`), Pillow's have 22 fractional bits (`i32`). PyTorch's AVX2
//! and portable kernels agree in every bit (measured on torch 2.13 over thousands of sizes), so
//! there is one reference. All sums are exact in 32 bits, so vector code may add in any order.
//!
//! | module | contents |
//! |---|---|
//! | `filters` | the filter functions |
//! | `fixed_point` | the fixed-point types of weights |
//! | `weights` | the inputs of each output pixel and their weights |
//! | `halves` | weights as 16-bit numbers, for AVX2 and NEON |
//! | `bytes`, `lanes` | weights as bytes, and their input bytes, for AVX-512 |
//! | `scalar`, `avx2`, `avx512`, `neon` | implementations of both passes |

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only used with AVX-512"))]
mod bytes;
mod filters;
mod fixed_point;
mod halves;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only used with AVX-512"))]
mod lanes;
#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod neon;
pub(super) mod scalar;
mod weights;

pub(crate) use filters::Filter;
pub(super) use fixed_point::FixedPoint;
pub(super) use weights::Weights;

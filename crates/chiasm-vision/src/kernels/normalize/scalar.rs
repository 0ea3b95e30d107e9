//! The reference implementation of normalising one channel value.

use half::bf16;

/// The normalisation of one channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Channel {
    /// The value itself.
    Identity,
    /// `value * factor`
    Scale(f32),
    /// `(value - mean) / std`
    Standardize { mean: f32, std: f32 },
    /// `(value / 255 - mean) / std`: torchvision's `ToTensor`, then `Normalize`.
    Unit { mean: f32, std: f32 },
    /// `(value * factor - mean) / std` in bfloat16: every operation is computed in f32, then
    /// rounded to bfloat16.
    Bfloat16 { factor: f32, mean: bf16, std: bf16 },
}

/// Normalises one value, rounding after each operation: a fused multiply-add would give other bits.
pub(crate) fn normalize(channel: Channel, value: u8) -> f32 {
    let value = f32::from(value);
    match channel {
        Channel::Identity => value,
        Channel::Scale(factor) => value * factor,
        Channel::Standardize { mean, std } => (value - mean) / std,
        Channel::Unit { mean, std } => (value / 255.0 - mean) / std,
        Channel::Bfloat16 { factor, mean, std } => {
            let round = |value: f32| bf16::from_f32(value).to_f32();
            round(round(round(value * factor) - mean.to_f32()) / std.to_f32())
        }
    }
}

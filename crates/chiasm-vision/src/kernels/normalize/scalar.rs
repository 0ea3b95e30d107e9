//! The reference for one channel's value.

use half::bf16;

/// What happens to a channel's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Channel {
    /// The value stays.
    Same,
    /// Multiplied.
    Scale(f32),
    /// `(value - mean) / std`
    Standardize { mean: f32, std: f32 },
    /// `(value / 255 - mean) / std`: torchvision's `ToTensor`, then `Normalize`.
    Unit { mean: f32, std: f32 },
    /// Multiplied by `factor` in bfloat16, then `(value - mean) / std` in bfloat16: every operation
    /// is computed in f32 and rounded.
    Brain { factor: f32, mean: bf16, std: bf16 },
}

/// The outcome for one value, with as many roundings as there are operations: a fused multiply-add
/// would differ.
pub(crate) fn normalize(channel: Channel, value: u8) -> f32 {
    let value = f32::from(value);
    match channel {
        Channel::Same => value,
        Channel::Scale(factor) => value * factor,
        Channel::Standardize { mean, std } => (value - mean) / std,
        Channel::Unit { mean, std } => (value / 255.0 - mean) / std,
        Channel::Brain { factor, mean, std } => {
            let round = |value: f32| bf16::from_f32(value).to_f32();
            round(round(round(value * factor) - mean.to_f32()) / std.to_f32())
        }
    }
}

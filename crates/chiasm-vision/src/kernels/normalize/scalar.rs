//! The reference for one channel's value.

/// What happens to a channel's values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Channel {
    /// Nothing.
    Same,
    /// Multiplied.
    Scale(f32),
    /// `(value - mean) / std`
    Standardize { mean: f32, std: f32 },
}

/// Two roundings to f32 where there are two operations: a fused multiply-add would differ.
pub(crate) fn normalize(channel: Channel, value: u8) -> f32 {
    let value = f32::from(value);
    match channel {
        Channel::Same => value,
        Channel::Scale(factor) => value * factor,
        Channel::Standardize { mean, std } => (value - mean) / std,
    }
}

//! Rescaling and normalising 8-bit channels. There are only 256 outcomes per channel: a table holds them.

pub(super) mod scalar;

use scalar::Channel;

/// For each channel and each 8-bit value, the bytes of the output element.
pub(crate) type ChannelTable<const N: usize> = [[[u8; N]; 256]; 3];

/// What happens to a channel's value, in the f32 operations of `transformers`' torchvision backend
/// (`rescale_and_normalize`).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Normalization {
    channels: [Channel; 3],
}

impl Normalization {
    /// `rescale`: the rescale factor if rescaling is on; `normalize`: mean and standard deviation if normalising is.
    pub(crate) fn new(rescale: Option<f64>, normalize: Option<([f64; 3], [f64; 3])>) -> Self {
        let channel = |index: usize| match (rescale, normalize) {
            (None, None) => Channel::Same,
            (Some(factor), None) => Channel::Scale(factor as f32),
            (None, Some((mean, std))) => Channel::Standardize { mean: mean[index] as f32, std: std[index] as f32 },
            // Fused: mean and deviation are scaled up instead of the pixels down.
            (Some(factor), Some((mean, std))) => {
                let scale = (1.0 / factor) as f32;
                Channel::Standardize { mean: mean[index] as f32 * scale, std: std[index] as f32 * scale }
            }
        };
        Self { channels: [channel(0), channel(1), channel(2)] }
    }

    /// All outcomes, each turned into bytes.
    pub(crate) fn table<const N: usize>(&self, encode: impl Fn(f32) -> [u8; N]) -> ChannelTable<N> {
        self.channels.map(|channel| std::array::from_fn(|value| encode(scalar::normalize(channel, value as u8))))
    }

    /// Appends bytes that differ if any outcome may differ.
    pub(crate) fn fingerprint(&self, out: &mut Vec<u8>) {
        for channel in self.channels {
            let (kind, numbers) = match channel {
                Channel::Same => (0, [0.0; 2]),
                Channel::Scale(factor) => (1, [factor, 0.0]),
                Channel::Standardize { mean, std } => (2, [mean, std]),
            };
            out.push(kind);
            out.extend(numbers.into_iter().flat_map(f32::to_le_bytes));
        }
    }
}

//! Rescaling and normalising 8-bit channels. There are only 256 outcomes per channel: a table holds
//! them.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
pub(super) mod scalar;

use half::bf16;
use scalar::Channel;

use crate::fingerprint::Fingerprint;

/// The bytes of the output element, by channel and by 8-bit value.
pub(crate) type ChannelTable<const N: usize> = [[[u8; N]; 256]; 3];

/// What happens to a channel's value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Normalization {
    channels: [Channel; 3],
}

/// Mean and standard deviation of each channel.
pub(crate) type MeanStd = ([f64; 3], [f64; 3]);

impl Normalization {
    /// The f32 operations of `transformers`' torchvision backend (`rescale_and_normalize`).
    /// `rescale`: the rescale factor if rescaling is on; `normalize`: mean and standard deviation
    /// if normalising is.
    pub(crate) fn new(rescale: Option<f64>, normalize: Option<MeanStd>) -> Self {
        match (rescale, normalize) {
            (None, None) => Self::of(|_| Channel::Same),
            (Some(factor), None) => Self::of(|_| Channel::Scale(factor as f32)),
            (None, Some((mean, std))) => Self::of(|index| Channel::Standardize {
                mean: mean[index] as f32,
                std: std[index] as f32,
            }),
            // Fused: mean and deviation are scaled up instead of the pixels down.
            (Some(factor), Some((mean, std))) => {
                let scale = (1.0 / factor) as f32;
                Self::of(|index| Channel::Standardize {
                    mean: mean[index] as f32 * scale,
                    std: std[index] as f32 * scale,
                })
            }
        }
    }

    /// torchvision's `ToTensor` and `Normalize`, in f32.
    pub(crate) fn unit((mean, std): MeanStd) -> Self {
        Self::of(|index| Channel::Unit { mean: mean[index] as f32, std: std[index] as f32 })
    }

    /// Rescaling and normalising in bfloat16, an operation after the other
    /// (`Llama4ImageProcessor`).
    pub(crate) fn brain(factor: f64, (mean, std): MeanStd) -> Self {
        let round = |number: f64| bf16::from_f32(number as f32);
        Self::of(|index| Channel::Brain {
            factor: factor as f32,
            mean: round(mean[index]),
            std: round(std[index]),
        })
    }

    fn of(channel: impl Fn(usize) -> Channel) -> Self {
        Self { channels: [channel(0), channel(1), channel(2)] }
    }

    /// All outcomes, each turned into bytes.
    pub(crate) fn table<const N: usize>(&self, encode: impl Fn(f32) -> [u8; N]) -> ChannelTable<N> {
        self.channels.map(|channel| {
            std::array::from_fn(|value| encode(scalar::normalize(channel, value as u8)))
        })
    }

    /// Writes what differs if any outcome may differ.
    pub(crate) fn fingerprint(&self, out: &mut Fingerprint) {
        for (name, channel) in ["red", "green", "blue"].into_iter().zip(self.channels) {
            match channel {
                Channel::Same => out.text(name, "as it is"),
                Channel::Scale(factor) => out.floats(&format!("{name}: scale"), &[factor]),
                Channel::Standardize { mean, std } => {
                    out.floats(&format!("{name}: mean, std"), &[mean, std])
                }
                Channel::Unit { mean, std } => {
                    out.floats(&format!("{name}: unit, mean, std"), &[mean, std])
                }
                Channel::Brain { factor, mean, std } => {
                    out.floats(
                        &format!("{name}: bfloat16 scale, mean, std"),
                        &[factor, mean.to_f32(), std.to_f32()],
                    );
                }
            }
        }
    }
}

//! Rescaling and normalising 8-bit channels, by lookup in a table of all 256 values per channel.

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(super) mod avx512;
pub(super) mod scalar;

use half::bf16;
use scalar::Channel;

use crate::fingerprint::Fingerprint;

/// A lookup table of output elements in bytes, by channel and 8-bit value.
pub(crate) type ChannelTable<const N: usize> = [[[u8; N]; 256]; 3];

/// The normalisation of all channels.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Normalization {
    channels: [Channel; 3],
}

/// The mean and standard deviation of each channel.
pub(crate) type MeanStd = ([f64; 3], [f64; 3]);

impl Normalization {
    /// Creates the f32 normalisation of the torchvision backend of `transformers`
    /// (`rescale_and_normalize`).
    ///
    /// `rescale` is the rescale factor if rescaling is on. `normalize` is the mean and standard
    /// deviation if normalising is on.
    pub(crate) fn new(rescale: Option<f64>, normalize: Option<MeanStd>) -> Self {
        match (rescale, normalize) {
            (None, None) => Self::from_channels(|_| Channel::Identity),
            (Some(factor), None) => Self::from_channels(|_| Channel::Scale(factor as f32)),
            (None, Some((mean, std))) => Self::from_channels(|index| Channel::Standardize {
                mean: mean[index] as f32,
                std: std[index] as f32,
            }),
            // Fused: scales up the mean and standard deviation instead of scaling down the pixels.
            (Some(factor), Some((mean, std))) => {
                let scale = (1.0 / factor) as f32;
                Self::from_channels(|index| Channel::Standardize {
                    mean: mean[index] as f32 * scale,
                    std: std[index] as f32 * scale,
                })
            }
        }
    }

    /// Creates the f32 normalisation of torchvision's `ToTensor` followed by `Normalize`.
    pub(crate) fn unit((mean, std): MeanStd) -> Self {
        Self::from_channels(|index| Channel::Unit {
            mean: mean[index] as f32,
            std: std[index] as f32,
        })
    }

    /// Creates the normalisation of `Llama4ImageProcessor`, which rescales and normalises in
    /// bfloat16, rounding after each operation.
    pub(crate) fn bfloat16(factor: f64, (mean, std): MeanStd) -> Self {
        let round = |number: f64| bf16::from_f32(number as f32);
        Self::from_channels(|index| Channel::Bfloat16 {
            factor: factor as f32,
            mean: round(mean[index]),
            std: round(std[index]),
        })
    }

    /// Creates a normalisation from a function of the channel index.
    fn from_channels(channel: impl Fn(usize) -> Channel) -> Self {
        Self { channels: [channel(0), channel(1), channel(2)] }
    }

    /// Returns the normalised values of all inputs, converted to bytes by `encode`.
    pub(crate) fn table<const N: usize>(&self, encode: impl Fn(f32) -> [u8; N]) -> ChannelTable<N> {
        self.channels.map(|channel| {
            std::array::from_fn(|value| encode(scalar::normalize(channel, value as u8)))
        })
    }

    /// Writes the parameters of each channel, which determine all normalised values.
    pub(crate) fn fingerprint(&self, out: &mut Fingerprint) {
        for (name, channel) in ["red", "green", "blue"].into_iter().zip(self.channels) {
            match channel {
                Channel::Identity => out.text(name, "as it is"),
                Channel::Scale(factor) => out.floats(&format!("{name}: scale"), &[factor]),
                Channel::Standardize { mean, std } => {
                    out.floats(&format!("{name}: mean, std"), &[mean, std])
                }
                Channel::Unit { mean, std } => {
                    out.floats(&format!("{name}: unit, mean, std"), &[mean, std])
                }
                Channel::Bfloat16 { factor, mean, std } => {
                    out.floats(
                        &format!("{name}: bfloat16 scale, mean, std"),
                        &[factor, mean.to_f32(), std.to_f32()],
                    );
                }
            }
        }
    }
}

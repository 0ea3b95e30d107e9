//! Settings that the image processors of all families share, as `transformers` 5.19 reads them.
//!
//! A missing key means the default of the class. A null is taken at its word in most places
//! (`BaseImageProcessor.__init__` sets it before the defaults are asked for): off for a switch, refused for a number.

use serde_json::Value;

use crate::VisionError;
use crate::kernels::{Filter, MeanStd, Normalization};
use crate::model_dir::Section;

/// `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD` of `transformers`.
pub(crate) const CLIP: MeanStd = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]);
/// `IMAGENET_STANDARD_MEAN` and `IMAGENET_STANDARD_STD` of `transformers`.
pub(crate) const STANDARD: MeanStd = ([0.5; 3], [0.5; 3]);

/// The filter of the resize, by its number in Pillow (`PILImageResampling`).
pub(crate) fn resample(file: &Section, default: Filter) -> Result<Filter, VisionError> {
    match file.get("resample").map(Value::as_u64) {
        None => Ok(default),
        Some(Some(2)) => Ok(Filter::Bilinear),
        Some(Some(3)) => Ok(Filter::Bicubic),
        Some(_) => Err(file.problem("resample", "must be 2 (bilinear) or 3 (bicubic)")),
    }
}

/// Rescaling and normalising as the torchvision backend does it; `default` is the class's mean and deviation.
pub(crate) fn normalization(file: &Section, default: MeanStd) -> Result<Normalization, VisionError> {
    let (rescale, normalize) = rescale_and_normalize(file, default)?;
    Ok(Normalization::new(rescale, normalize))
}

/// The rescale factor if rescaling is on; mean and standard deviation if normalising is.
pub(crate) fn rescale_and_normalize(
    file: &Section,
    default: MeanStd,
) -> Result<(Option<f64>, Option<MeanStd>), VisionError> {
    let rescale = match file.flag("do_rescale", true)? {
        true => Some(rescale_factor(file)?),
        false => None,
    };
    let normalize = match file.flag("do_normalize", true)? {
        true => Some((channels(file, "image_mean", default.0)?, channels(file, "image_std", default.1)?)),
        false => None,
    };
    if normalize.is_some_and(|(_, std)| std.iter().any(|std| *std as f32 == 0.0)) {
        return Err(file.problem("image_std", "must not be 0"));
    }
    Ok((rescale, normalize))
}

fn rescale_factor(file: &Section) -> Result<f64, VisionError> {
    file.get("rescale_factor").map_or(Ok(1.0 / 255.0), |value| {
        value
            .as_f64()
            .filter(|factor| factor.is_normal())
            .ok_or_else(|| file.problem("rescale_factor", "must be a number other than 0"))
    })
}

/// One number per channel, or one for all.
fn channels(file: &Section, key: &'static str, default: [f64; 3]) -> Result<[f64; 3], VisionError> {
    let Some(value) = file.get(key) else {
        return Ok(default);
    };
    let channels = match value {
        Value::Array(values) => match values.as_slice() {
            [red, green, blue] => [red.as_f64(), green.as_f64(), blue.as_f64()],
            _ => [None; 3],
        },
        value => [value.as_f64(); 3],
    };
    match channels {
        [Some(red), Some(green), Some(blue)] => Ok([red, green, blue]),
        _ => Err(file.problem(key, "must be a number or a list of 3 numbers")),
    }
}

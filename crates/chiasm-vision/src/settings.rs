//! Settings that the image processors of all families share, read as `transformers` 5.19 does.
//!
//! A missing key means the default of the class. For most keys, null does not mean the default,
//! because `BaseImageProcessor.__init__` sets the null before it applies defaults. A null switch is
//! off; a null number is an error.

use serde_json::{Map, Value};

use crate::kernels::{Filter, MeanStd, Normalization};
use crate::model_dir::Section;
use crate::{ImageSize, VisionError};

/// `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD` of `transformers`.
pub(crate) const CLIP: MeanStd =
    ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]);
/// `IMAGENET_STANDARD_MEAN` and `IMAGENET_STANDARD_STD` of `transformers`.
pub(crate) const STANDARD: MeanStd = ([0.5; 3], [0.5; 3]);

/// Returns a family's image processor settings, overridden by a request's `mm_processor_kwargs`.
///
/// The result is read like the file, because `transformers` treats both alike.
///
/// # Errors
/// [`VisionError::UnknownKwarg`] for a key that is not in `known`, [`VisionError::InvalidKwarg`]
/// for a null.
pub(crate) fn with_overrides(
    file: &Section,
    kwargs: &Map<String, Value>,
    known: &'static [&'static str],
) -> Result<Section, VisionError> {
    let mut file = file.clone();
    for (key, value) in kwargs {
        let Some(&name) = known.iter().find(|known| *known == key) else {
            return Err(VisionError::UnknownKwarg { key: key.clone(), known });
        };
        if value.is_null() {
            return Err(VisionError::InvalidKwarg {
                key: name,
                problem: "must not be null".into(),
            });
        }
        file.values.insert(key.clone(), value.clone());
    }
    Ok(file)
}

/// Converts the error of a setting into the error of a request's kwarg.
pub(crate) fn as_kwarg_error(error: VisionError) -> VisionError {
    match error {
        VisionError::Setting { key, problem, .. } => VisionError::InvalidKwarg { key, problem },
        other => other,
    }
}

/// Reads the factor by which a grid of embeddings shrinks in each direction.
///
/// It is above 0 and at most 1. The default of both InternVL and Llama 4 is 0.5.
pub(crate) fn downsample_ratio(section: &Section, key: &'static str) -> Result<f64, VisionError> {
    let ratio = section.get(key).map_or(Some(0.5), Value::as_f64);
    ratio
        .filter(|ratio| *ratio > 0.0 && *ratio <= 1.0)
        .ok_or_else(|| section.problem(key, "must be a number above 0 and at most 1"))
}

/// The size to which an image is resized: the supported forms of `size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ResizeTarget {
    /// The new length of the shorter side in pixels; the aspect ratio is kept.
    ShortestEdge(u32),
    /// The exact new size.
    Exact(ImageSize),
}

/// The largest side accepted from settings, in pixels. Far above that of any vision tower.
const MAX_SIDE_PIXELS: u64 = 1 << 13;

impl ResizeTarget {
    /// Returns the size of an image after the resize (`TorchvisionBackend.resize`).
    pub(crate) fn resized(self, size: ImageSize) -> ImageSize {
        match self {
            Self::Exact(size) => size,
            Self::ShortestEdge(edge) => {
                let short = size.width.min(size.height);
                let long = size.width.max(size.height);
                // int(edge * long / short) in Python: its integers are exact in an f64.
                let long = (f64::from(edge) * f64::from(long) / f64::from(short)) as u32;
                if size.width <= size.height {
                    ImageSize { width: edge, height: long }
                } else {
                    ImageSize { width: long, height: edge }
                }
            }
        }
    }
}

/// Reads `size`: `{"shortest_edge"}`, `{"height", "width"}` or a number.
///
/// A number means the exact size of a square if `square`, else the shortest edge. A missing `size`
/// means `default`. Null is an error: `transformers` fails on it with the first image.
pub(crate) fn resize_target(
    file: &Section,
    default: ResizeTarget,
    square: bool,
) -> Result<ResizeTarget, VisionError> {
    const PROBLEM: &str = "must be an object with shortest_edge or with height and width";
    let edge = |value: &Value| {
        let edge = value.as_u64().filter(|edge| (1..=MAX_SIDE_PIXELS).contains(edge));
        edge.map(|edge| edge as u32)
            .ok_or_else(|| file.problem("size", format!("must be from 1 to {MAX_SIDE_PIXELS}")))
    };
    match file.get("size") {
        None => Ok(default),
        Some(Value::Object(size)) => {
            match (size.get("shortest_edge"), size.get("height"), size.get("width")) {
                (Some(value), None, None) if size.len() == 1 => {
                    Ok(ResizeTarget::ShortestEdge(edge(value)?))
                }
                (None, Some(height), Some(width)) if size.len() == 2 => {
                    Ok(ResizeTarget::Exact(ImageSize {
                        width: edge(width)?,
                        height: edge(height)?,
                    }))
                }
                _ => Err(file.problem("size", PROBLEM)),
            }
        }
        Some(value @ Value::Number(_)) if square => {
            let side = edge(value)?;
            Ok(ResizeTarget::Exact(ImageSize { width: side, height: side }))
        }
        Some(value @ Value::Number(_)) => Ok(ResizeTarget::ShortestEdge(edge(value)?)),
        Some(_) => Err(file.problem("size", PROBLEM)),
    }
}

/// Reads an exact size under `key`: `{"height", "width"}`, `[height, width]`, or a number for a
/// square.
///
/// A missing key means `default`.
pub(crate) fn exact_size(
    file: &Section,
    key: &'static str,
    default: ImageSize,
) -> Result<ImageSize, VisionError> {
    let side = |value: Option<&Value>| {
        let side =
            value.and_then(Value::as_u64).filter(|side| (1..=MAX_SIDE_PIXELS).contains(side));
        side.map(|side| side as u32).ok_or_else(|| {
            file.problem(
                key,
                format!(
                    "must be an object with height and width, or a number, from 1 to \
                     {MAX_SIDE_PIXELS}"
                ),
            )
        })
    };
    match file.get(key) {
        None => Ok(default),
        Some(Value::Array(sides)) if sides.len() == 2 => {
            Ok(ImageSize { width: side(sides.get(1))?, height: side(sides.first())? })
        }
        Some(Value::Object(size)) => {
            Ok(ImageSize { width: side(size.get("width"))?, height: side(size.get("height"))? })
        }
        number => side(number).map(ImageSize::square),
    }
}

/// Reads the filter of the resize, given by its number in Pillow (`PILImageResampling`).
pub(crate) fn resample(file: &Section, default: Filter) -> Result<Filter, VisionError> {
    match file.get("resample").map(Value::as_u64) {
        None => Ok(default),
        Some(Some(1)) => Ok(Filter::Lanczos),
        Some(Some(2)) => Ok(Filter::Bilinear),
        Some(Some(3)) => Ok(Filter::Bicubic),
        Some(_) => {
            Err(file.problem("resample", "must be 1 (Lanczos), 2 (bilinear) or 3 (bicubic)"))
        }
    }
}

/// Reads the settings of rescaling and normalising as the torchvision backend does.
///
/// `default` is the mean and standard deviation of the class.
pub(crate) fn normalization(
    file: &Section,
    default: MeanStd,
) -> Result<Normalization, VisionError> {
    let (rescale, normalize) = rescale_and_normalize(file, default)?;
    Ok(Normalization::new(rescale, normalize))
}

/// Reads the rescale factor if rescaling is on, and mean and standard deviation if normalising is.
pub(crate) fn rescale_and_normalize(
    file: &Section,
    default: MeanStd,
) -> Result<(Option<f64>, Option<MeanStd>), VisionError> {
    let rescale = if file.flag("do_rescale", true)? { Some(rescale_factor(file)?) } else { None };
    let normalize = if file.flag("do_normalize", true)? {
        let mean = channels(file, "image_mean", default.0)?;
        let std = channels(file, "image_std", default.1)?;
        Some((mean, std))
    } else {
        None
    };
    if normalize.is_some_and(|(_, std)| std.iter().any(|std| *std as f32 == 0.0)) {
        return Err(file.problem("image_std", "must not be 0"));
    }
    Ok((rescale, normalize))
}

/// Reads the rescale factor; 1/255 if missing.
fn rescale_factor(file: &Section) -> Result<f64, VisionError> {
    file.get("rescale_factor").map_or(Ok(1.0 / 255.0), |value| {
        value
            .as_f64()
            .filter(|factor| factor.is_normal())
            .ok_or_else(|| file.problem("rescale_factor", "must be a number other than 0"))
    })
}

/// Reads one number per channel, or one number for all channels.
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

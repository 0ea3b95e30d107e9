//! Settings that the image processors of all families share, as `transformers` 5.19 reads them.
//!
//! A missing key means the default of the class. A null is taken at its word in most places
//! (`BaseImageProcessor.__init__` sets it before the defaults are asked for): off for a switch,
//! refused for a number.

use serde_json::{Map, Value};

use crate::kernels::{Filter, MeanStd, Normalization};
use crate::model_dir::Section;
use crate::{ImageSize, VisionError};

/// `OPENAI_CLIP_MEAN` and `OPENAI_CLIP_STD` of `transformers`.
pub(crate) const CLIP: MeanStd =
    ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]);
/// `IMAGENET_STANDARD_MEAN` and `IMAGENET_STANDARD_STD` of `transformers`.
pub(crate) const STANDARD: MeanStd = ([0.5; 3], [0.5; 3]);

/// A family's image processor settings with a request's `mm_processor_kwargs` put in their place:
/// read as the file is read, since `transformers` treats both alike.
pub(crate) fn overridden(
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

/// What is wrong with a setting, said of a request's kwarg.
pub(crate) fn as_kwarg(error: VisionError) -> VisionError {
    match error {
        VisionError::Setting { key, problem, .. } => VisionError::InvalidKwarg { key, problem },
        other => other,
    }
}

/// The factor by which a grid of embeddings shrinks in each direction: above 0 and at most 1. Both
/// InternVL's and Llama 4's default is a half.
pub(crate) fn shrinking(section: &Section, key: &'static str) -> Result<f64, VisionError> {
    let ratio = section.get(key).map_or(Some(0.5), Value::as_f64);
    ratio
        .filter(|ratio| *ratio > 0.0 && *ratio <= 1.0)
        .ok_or_else(|| section.problem(key, "must be a number above 0 and at most 1"))
}

/// The size to which an image is resized (`size` in its forms that are supported).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Target {
    /// The shorter side becomes so long, the other keeps the ratio.
    ShortestEdge(u32),
    /// Exactly this.
    Exact(ImageSize),
}

/// Longer sides than this are not taken from settings: no vision tower comes near.
const LONGEST: u64 = 1 << 13;

impl Target {
    /// The size after the resize (`TorchvisionBackend.resize`).
    pub(crate) fn of(self, size: ImageSize) -> ImageSize {
        match self {
            Self::Exact(size) => size,
            Self::ShortestEdge(edge) => {
                let (short, long) = (size.width.min(size.height), size.width.max(size.height));
                // int(edge * long / short) in Python: a division of integers that an f64 holds.
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

/// `size`: `{"shortest_edge"}`, `{"height", "width"}`, or a number, which is the first or, if
/// `square`, the second. A missing one is the default; `transformers` fails on a null with the
/// first image.
pub(crate) fn target(file: &Section, default: Target, square: bool) -> Result<Target, VisionError> {
    const PROBLEM: &str = "must be an object with shortest_edge or with height and width";
    let edge = |value: &Value| {
        let edge = value.as_u64().filter(|edge| (1..=LONGEST).contains(edge));
        edge.map(|edge| edge as u32)
            .ok_or_else(|| file.problem("size", format!("must be from 1 to {LONGEST}")))
    };
    match file.get("size") {
        None => Ok(default),
        Some(Value::Object(size)) => {
            match (size.get("shortest_edge"), size.get("height"), size.get("width")) {
                (Some(value), None, None) if size.len() == 1 => {
                    Ok(Target::ShortestEdge(edge(value)?))
                }
                (None, Some(height), Some(width)) if size.len() == 2 => {
                    Ok(Target::Exact(ImageSize { width: edge(width)?, height: edge(height)? }))
                }
                _ => Err(file.problem("size", PROBLEM)),
            }
        }
        Some(value @ Value::Number(_)) if square => {
            let side = edge(value)?;
            Ok(Target::Exact(ImageSize { width: side, height: side }))
        }
        Some(value @ Value::Number(_)) => Ok(Target::ShortestEdge(edge(value)?)),
        Some(_) => Err(file.problem("size", PROBLEM)),
    }
}

/// An exact size under `key`: `{"height", "width"}`, `[height, width]`, or a number for a square. A
/// missing one is the default.
pub(crate) fn exact_size(
    file: &Section,
    key: &'static str,
    default: ImageSize,
) -> Result<ImageSize, VisionError> {
    let side = |value: Option<&Value>| {
        let side = value.and_then(Value::as_u64).filter(|side| (1..=LONGEST).contains(side));
        side.map(|side| side as u32).ok_or_else(|| {
            file.problem(
                key,
                format!(
                    "must be an object with height and width, or a number, from 1 to {LONGEST}"
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

/// The filter of the resize, by its number in Pillow (`PILImageResampling`).
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

/// Rescaling and normalising as the torchvision backend does it; `default` is the class's mean and
/// deviation.
pub(crate) fn normalization(
    file: &Section,
    default: MeanStd,
) -> Result<Normalization, VisionError> {
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
        true => Some((
            channels(file, "image_mean", default.0)?,
            channels(file, "image_std", default.1)?,
        )),
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

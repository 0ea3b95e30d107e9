//! The image processor's settings, with the defaults of `Qwen2VLImageProcessor` in `transformers`
//! 5.19.
//!
//! A missing key means the default of the class, and so does a null bound. For other keys, null
//! does not mean the default, because `BaseImageProcessor.__init__` sets the null before it applies
//! defaults: a null switch is off, a null number is an error.

use crate::VisionError;
use crate::kernels::{Filter, Normalization};
use crate::model_dir::Section;
use crate::settings::{self, CLIP};

/// The default `min_pixels` of the class.
const DEFAULT_MIN_PIXELS: u64 = 56 * 56;
/// The default `max_pixels` of the class.
const DEFAULT_MAX_PIXELS: u64 = 28 * 28 * 1280;
/// The maximum patch size, merge size and temporal patch size. Far above that of any model; keeps
/// products within bounds.
pub(crate) const MAX_PATCH_SIZE: u64 = 1024;

/// The settings of a model's image processor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// The side of a patch in pixels.
    pub(super) patch: u32,
    /// The side in patches of the square that becomes one token.
    pub(super) merge: u32,
    /// The number of frames per patch. A still image is repeated in each frame.
    pub(super) temporal: u32,
    pub(super) do_resize: bool,
    /// The minimum area after resizing: `size.shortest_edge`, despite its name.
    pub(super) min_pixels: u64,
    /// The maximum area after resizing: `size.longest_edge`, despite its name.
    pub(super) max_pixels: u64,
    pub(super) normalization: Normalization,
}

impl Settings {
    pub(super) fn read(file: &Section) -> Result<Self, VisionError> {
        let side = |key, default| match file.positive(key)?.unwrap_or(default) {
            side @ 1..=MAX_PATCH_SIZE => Ok(side as u32),
            _ => Err(file.problem(key, format!("must be at most {MAX_PATCH_SIZE}"))),
        };
        let (min_pixels, max_pixels) = read_bounds(file, (DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS))?;
        let do_resize = file.flag("do_resize", true)?;
        if do_resize && settings::resample(file, Filter::Bicubic)? != Filter::Bicubic {
            return Err(file.problem("resample", "must be 3 (bicubic)"));
        }
        Ok(Self {
            patch: side("patch_size", 14)?,
            merge: side("merge_size", 2)?,
            temporal: side("temporal_patch_size", 2)?,
            do_resize,
            min_pixels,
            max_pixels,
            normalization: settings::normalization(file, CLIP)?,
        })
    }
}

/// Reads the bounds of the area; a missing bound has its default.
///
/// `min_pixels` and `max_pixels` beside `size` are older and override its edges. Each of them also
/// allows the same key inside `size`, where it is ignored. Otherwise `size` must have exactly its
/// two edges.
pub(crate) fn read_bounds(
    file: &Section,
    (default_min, default_max): (u64, u64),
) -> Result<(u64, u64), VisionError> {
    let legacy_min = file.nullable_positive("min_pixels")?;
    let legacy_max = file.nullable_positive("max_pixels")?;
    let Some(size) = file.section("size")? else {
        let min_pixels = legacy_min.unwrap_or(default_min);
        let max_pixels = legacy_max.unwrap_or(default_max);
        return Ok((min_pixels, max_pixels));
    };
    let unexpected = size.values.keys().find(|key| match key.as_str() {
        "shortest_edge" | "longest_edge" => false,
        "min_pixels" => legacy_min.is_none(),
        "max_pixels" => legacy_max.is_none(),
        _ => true,
    });
    if let Some(key) = unexpected {
        let problem = format!("has the key {key:?}, but must have shortest_edge and longest_edge");
        return Err(file.problem("size", problem));
    }
    let edge = |legacy: Option<u64>, key| match legacy {
        Some(pixels) => Ok(pixels),
        None => size.positive(key)?.ok_or_else(|| {
            file.problem("size", format!("lacks the key {key:?}, but must have both edges"))
        }),
    };
    Ok((edge(legacy_min, "shortest_edge")?, edge(legacy_max, "longest_edge")?))
}

//! The image processor's settings with the defaults of `Qwen2VLImageProcessor` in `transformers`
//! 5.19.
//!
//! A missing key means the default of the class. A null means it too for the bounds; elsewhere it
//! is taken at its word (`BaseImageProcessor.__init__` sets it before the defaults are asked for):
//! off for a switch, refused for a number.

use crate::VisionError;
use crate::kernels::{Filter, Normalization};
use crate::model_dir::Section;
use crate::settings::{self, CLIP};

const MIN_PIXELS: u64 = 56 * 56;
const MAX_PIXELS: u64 = 28 * 28 * 1280;
/// Far above any model's; keeps products within bounds.
const LARGEST_PATCH: u64 = 1024;

/// Settings of one model's image processor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    /// Side of a patch in pixels.
    pub(super) patch: u32,
    /// Side in patches of the square that becomes one token.
    pub(super) merge: u32,
    /// Frames per patch: a still image is repeated so often.
    pub(super) temporal: u32,
    pub(super) do_resize: bool,
    /// Bounds of the area after resizing: `size.shortest_edge` and `size.longest_edge`, despite
    /// their names.
    pub(super) min_pixels: u64,
    pub(super) max_pixels: u64,
    pub(super) normalization: Normalization,
}

impl Settings {
    pub(super) fn read(file: &Section) -> Result<Self, VisionError> {
        let side = |key, default| match file.positive(key)?.unwrap_or(default) {
            side @ 1..=LARGEST_PATCH => Ok(side as u32),
            _ => Err(file.problem(key, format!("must be at most {LARGEST_PATCH}"))),
        };
        let (min_pixels, max_pixels) = read_size(file)?;
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

/// `min_pixels` and `max_pixels` beside `size` are older and win over its edges. They also drop
/// namesakes inside `size`, without which `size` must have exactly its two edges.
fn read_size(file: &Section) -> Result<(u64, u64), VisionError> {
    let legacy = [file.nullable_positive("min_pixels")?, file.nullable_positive("max_pixels")?];
    let Some(size) = file.section("size")? else {
        return Ok((legacy[0].unwrap_or(MIN_PIXELS), legacy[1].unwrap_or(MAX_PIXELS)));
    };
    let unexpected = size.values.keys().find(|key| match key.as_str() {
        "shortest_edge" | "longest_edge" => false,
        "min_pixels" => legacy[0].is_none(),
        "max_pixels" => legacy[1].is_none(),
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
    Ok((edge(legacy[0], "shortest_edge")?, edge(legacy[1], "longest_edge")?))
}

//! The properties of the LLaVA vision towers that determine layouts.

use crate::fingerprint::Fingerprint;
use crate::model_dir::ModelDir;
use crate::{ImageSize, VisionError};

/// A tower that takes images of one square size and makes one embedding per patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tower {
    /// The side of the image in pixels.
    pub(super) side: u32,
    /// The number of patches along a side.
    pub(super) grid: u32,
    /// The number of embeddings per image that are passed to the language model.
    pub(super) tokens: usize,
}

/// The maximum side of an image in pixels. Far above that of any model; keeps products within
/// bounds.
const MAX_SIDE_PIXELS: u64 = 1 << 14;

impl Tower {
    /// Reads `vision_config` and `vision_feature_select_strategy`, and counts embeddings as vLLM's
    /// `CLIPEncoderInfo` and `SiglipEncoderInfo` do.
    ///
    /// The defaults of `image_size` and `patch_size` are those of the `LlavaConfig` class.
    pub(super) fn read(dir: &ModelDir) -> Result<Self, VisionError> {
        // CLIP adds a class embedding before the patches' embeddings.
        let (side, patch, class_embeddings) = match dir.vision.text("model_type")? {
            None | Some("clip_vision_model") => (224, 32, 1),
            Some("siglip_vision_model") => (224, 16, 0),
            Some(other) => {
                let problem =
                    format!("is {other:?}, but must be clip_vision_model or siglip_vision_model");
                return Err(dir.vision.problem("model_type", problem));
            }
        };
        let side = dir.vision.positive("image_size")?.unwrap_or(side);
        let patch = dir.vision.positive("patch_size")?.unwrap_or(patch);
        if side > MAX_SIDE_PIXELS
            || side < patch
            || (class_embeddings == 1 && !side.is_multiple_of(patch))
        {
            let problem = format!(
                "must be a multiple of patch_size, which is {patch}, and at most {MAX_SIDE_PIXELS}"
            );
            return Err(dir.vision.problem("image_size", problem));
        }
        let grid = (side / patch) as u32;
        let side = side as u32;
        let embeddings = grid as usize * grid as usize + class_embeddings;
        let tokens = match dir.config.text("vision_feature_select_strategy")? {
            None | Some("default") => embeddings - 1,
            Some("full") => embeddings,
            Some(_) => {
                return Err(dir
                    .config
                    .problem("vision_feature_select_strategy", "must be default or full"));
            }
        };
        if tokens == 0 {
            return Err(dir.vision.problem("patch_size", "leaves no embedding of an image"));
        }
        Ok(Self { side, grid, tokens })
    }

    /// Writes the properties of the tower to a fingerprint.
    pub(super) fn fingerprint(self, out: &mut Fingerprint) {
        let Self { side, grid, tokens } = self;
        out.integer("tower_side", side);
        out.integer("tower_grid", grid);
        out.count("tower_tokens", tokens);
    }

    /// Returns the only image size that the tower takes.
    pub(super) const fn size(self) -> ImageSize {
        ImageSize::square(self.side)
    }
}

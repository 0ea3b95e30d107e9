//! The vision towers of the LLaVA models, as far as layouts depend on them.

use crate::fingerprint::Fingerprint;
use crate::model_dir::ModelDir;
use crate::{ImageSize, VisionError};

/// A tower that takes images of one size and makes one embedding per patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tower {
    /// Side of the image that it takes.
    pub(super) side: u32,
    /// Patches along a side.
    pub(super) grid: u32,
    /// Embeddings of one image that the language model gets.
    pub(super) tokens: usize,
}

/// Far above any model's; keeps products within bounds.
const LARGEST_SIDE: u64 = 1 << 14;

impl Tower {
    /// `vision_config` and `vision_feature_select_strategy`, as vLLM's `CLIPEncoderInfo` and
    /// `SiglipEncoderInfo` count. `clip` is what the `LlavaConfig` class makes of a `vision_config`
    /// without `image_size` or `patch_size`.
    pub(super) fn read(dir: &ModelDir) -> Result<Self, VisionError> {
        // CLIP puts a class embedding before those of the patches.
        let (side, patch, class) = match dir.vision.text("model_type")? {
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
        if side > LARGEST_SIDE || side < patch || (class == 1 && !side.is_multiple_of(patch)) {
            let problem = format!(
                "must be a multiple of patch_size, which is {patch}, and at most {LARGEST_SIDE}"
            );
            return Err(dir.vision.problem("image_size", problem));
        }
        let (side, grid) = (side as u32, (side / patch) as u32);
        let embeddings = grid as usize * grid as usize + class;
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

    pub(super) fn fingerprint(self, out: &mut Fingerprint) {
        let Self { side, grid, tokens } = self;
        out.integer("tower_side", side);
        out.integer("tower_grid", grid);
        out.count("tower_tokens", tokens);
    }

    /// The one size that it takes.
    pub(super) const fn size(self) -> ImageSize {
        ImageSize::square(self.side)
    }
}

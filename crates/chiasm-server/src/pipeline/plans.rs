//! Layouts of images that were seen before.

use std::sync::Arc;

use chiasm_types::MmHash;
use chiasm_vision::ImagePlan;
use quick_cache::sync::Cache;

use crate::error::ApiError;

/// Plans that are kept. Most take one or two kilobytes; large images of families with a token per row of patches up to ten.
const KEPT: usize = 1 << 12;

/// Plans by what they are for: an image and everything that changes its tensors, in one model. Clones share them.
#[derive(Clone)]
pub struct Plans {
    plans: Arc<Cache<MmHash, Arc<ImagePlan>>>,
}

impl Plans {
    /// The plan that is known, or the one that is made.
    pub(super) fn get_or_make(
        &self,
        hash: MmHash,
        make: impl FnOnce() -> Result<ImagePlan, ApiError>,
    ) -> Result<Arc<ImagePlan>, ApiError> {
        if let Some(plan) = self.plans.get(&hash) {
            return Ok(plan);
        }
        let plan = Arc::new(make()?);
        self.plans.insert(hash, plan.clone());
        Ok(plan)
    }
}

impl Default for Plans {
    fn default() -> Self {
        Self { plans: Arc::new(Cache::new(KEPT)) }
    }
}

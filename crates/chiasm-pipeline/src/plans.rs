//! Plans of media items that were seen before.

use std::sync::Arc;

use chiasm_types::MmHash;
use quick_cache::sync::Cache;

use super::error::RequestError;

/// Plans that are kept. Most take one or two kilobytes; large images of families with a token per
/// row of patches up to ten.
const KEPT: usize = 1 << 12;

/// Plans of one modality by the identity of the items that they are for.
pub(super) struct Plans<P> {
    plans: Cache<MmHash, Arc<P>>,
}

impl<P> Plans<P> {
    /// The plan that is known.
    pub(super) fn get(&self, hash: &MmHash) -> Option<Arc<P>> {
        self.plans.get(hash)
    }

    /// The plan that is known, or the one that is made.
    pub(super) fn get_or_make(
        &self,
        hash: MmHash,
        make: impl FnOnce() -> Result<P, RequestError>,
    ) -> Result<Arc<P>, RequestError> {
        if let Some(plan) = self.plans.get(&hash) {
            return Ok(plan);
        }
        let plan = Arc::new(make()?);
        self.plans.insert(hash, plan.clone());
        Ok(plan)
    }
}

impl<P> Default for Plans<P> {
    fn default() -> Self {
        Self { plans: Cache::new(KEPT) }
    }
}

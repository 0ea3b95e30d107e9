//! A cache of media items' plans.

use std::sync::Arc;

use chiasm_types::MmHash;
use quick_cache::sync::Cache;

use super::error::RequestError;

/// The maximum number of cached plans. Most take one or two kilobytes; those of large images, in
/// families with a token per row of patches, take up to ten.
const MAX_PLANS: usize = 1 << 12;

/// The plans of one modality, by item identity.
pub(super) struct PlanCache<P> {
    plans: Cache<MmHash, Arc<P>>,
}

impl<P> PlanCache<P> {
    /// Returns a cached plan.
    pub(super) fn get(&self, hash: &MmHash) -> Option<Arc<P>> {
        self.plans.get(hash)
    }

    /// Returns a cached plan, or builds and caches one.
    pub(super) fn get_or_build(
        &self,
        hash: MmHash,
        build: impl FnOnce() -> Result<P, RequestError>,
    ) -> Result<Arc<P>, RequestError> {
        if let Some(plan) = self.plans.get(&hash) {
            return Ok(plan);
        }
        let plan = Arc::new(build()?);
        self.plans.insert(hash, plan.clone());
        Ok(plan)
    }
}

impl<P> Default for PlanCache<P> {
    fn default() -> Self {
        Self { plans: Cache::new(MAX_PLANS) }
    }
}

//! The conversion of a job into a request to an EngineCore.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use chiasm_backend::{Job, ReasoningHints};
use chiasm_types::TokenId;

use crate::wire::{EngineCoreRequest, LoraRequest, MmFeature, SamplingParams};

/// The parts of a request that are not copied from its job.
pub(super) struct RequestParts {
    pub(super) request_id: String,
    pub(super) prompt_token_ids: Arc<Vec<TokenId>>,
    pub(super) mm_features: Vec<MmFeature>,
    pub(super) sampling_params: SamplingParams,
    pub(super) lora_request: Option<Arc<LoraRequest>>,
    /// The wave of engines that step together; 0 for an engine on its own.
    pub(super) current_wave: i64,
}

/// Creates the request of one continuation.
pub(super) fn from_job(job: &Job, parts: RequestParts) -> EngineCoreRequest {
    let RequestParts {
        request_id,
        prompt_token_ids,
        mm_features,
        sampling_params,
        lora_request,
        current_wave,
    } = parts;
    let Job {
        cache_salt,
        priority,
        trace,
        reasoning,
        // These are in the parts.
        id: _,
        input: _,
        media: _,
        sampling: _,
        adapter: _,
        stage: _,
        // The engine finds embeddings by the identities of the media items.
        embedded: _,
    } = job;
    let ReasoningHints { is_over, variables } = reasoning;
    let headers = trace.iter().flat_map(|trace| trace.headers());
    EngineCoreRequest {
        request_id,
        prompt_token_ids,
        mm_features,
        sampling_params,
        arrival_time: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0.0, |since| since.as_secs_f64()),
        lora_request,
        cache_salt: cache_salt.clone(),
        // The engine has one output address.
        client_index: 0,
        current_wave,
        priority: *priority,
        trace_headers: headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        // The request's own id starts with the job's id.
        external_req_id: None,
        reasoning_ended: is_over.then_some(true),
        reasoning_variables: variables
            .iter()
            .map(|&(name, value)| (name.to_owned(), value))
            .collect(),
    }
}

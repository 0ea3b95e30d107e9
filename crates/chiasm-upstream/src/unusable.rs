//! Errors of querying a server's description.

use crate::models::ModelError;
use crate::server::RequestError;

/// A reason that a server can't be used, for the operator.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// The server does not answer as expected.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The server does not have the expected model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An answer is malformed.
    #[error("its answer to /{path} can't be read: {source}")]
    Answer { path: &'static str, source: serde_json::Error },
    /// The server refuses requests without a key, or with this key.
    #[error("it wants a key (api-key-file=FILE behind its address)")]
    KeyRequired,
    /// A vLLM without the path for tokens.
    #[error(
        "it takes no tokens at /inference/v1/generate: start it with --enable-scale-out, or give \
         it requests as they come (mode=chat behind its address)"
    )]
    NoTokens,
    /// The server does not have SGLang's path for tokens.
    #[error("it takes no tokens at /generate: is it SGLang?")]
    NotSglang,
    /// The server does not refuse an empty request as expected.
    #[error("it answers {status} to an empty request at /{path}")]
    EmptyRequest { status: u16, path: &'static str },
    /// A vLLM that does not report its block size.
    #[error("it does not tell its blocks' size (vllm:cache_config_info of /metrics)")]
    NoBlockSize,
    /// An SGLang that reports a block size of 0.
    #[error("its blocks have no size (page_size of /server_info)")]
    NoPageSize,
    /// The model does not generate, for example because it computes embeddings.
    #[error("its model generates nothing")]
    GeneratesNothing,
    /// The server is one side of a disaggregated SGLang.
    #[error("it does a part of each answer alone (--disaggregation-mode)")]
    Disaggregated,
    /// The server has no metrics.
    #[error("it does not tell its load at /metrics: start it with --enable-metrics")]
    NoMetrics,
}

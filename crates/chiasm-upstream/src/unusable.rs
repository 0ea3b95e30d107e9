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
    #[error("its answer of /{path} can't be read: {source}")]
    Answer { path: &'static str, source: serde_json::Error },
    /// The server refuses requests without a key, or with this key.
    #[error("it requires an API key (api-key-file=FILE after its address)")]
    KeyRequired,
    /// A vLLM without the path for tokens.
    #[error(
        "it has no /inference/v1/generate: start it with --enable-scale-out, or add mode=chat \
         after its address"
    )]
    NoTokens,
    /// The server does not have SGLang's path for tokens.
    #[error("it has no /generate: is it SGLang?")]
    NotSglang,
    /// The server does not refuse an empty request as expected.
    #[error("/{path} returned {status} for an empty request")]
    EmptyRequest { status: u16, path: &'static str },
    /// A vLLM that does not have the expected number of engines.
    #[error(
        "its address has ranks={expected}, but it has {found} engines \
         (vllm:cache_config_info of /metrics)"
    )]
    OtherRanks { found: usize, expected: u16 },
    /// A vLLM that does not report its block size.
    #[error("it does not report its block size (vllm:cache_config_info of /metrics)")]
    NoBlockSize,
    /// An SGLang that reports a block size of 0.
    #[error("it reports a block size of 0 (page_size of /server_info)")]
    NoPageSize,
    /// The model does not generate, for example because it computes embeddings.
    #[error("its model does not generate text")]
    GeneratesNothing,
    /// An SGLang whose kind was detected and that accepts images only beside text.
    #[error("it does not accept images with tokens")]
    ImagesNeedText,
    /// The server is one side of a disaggregated SGLang.
    #[error("it computes only a part of each answer (--disaggregation-mode)")]
    Disaggregated,
    /// The server has no metrics.
    #[error("it does not report its load at /metrics: start it with --enable-metrics")]
    NoMetrics,
}

impl Unusable {
    /// Returns `true` if the server answered, but not as a server of its kind does. Another attempt
    /// would end in the same way.
    pub(crate) fn is_about_kind(&self) -> bool {
        match self {
            Self::Request(error) => {
                matches!(error, RequestError::Refused { .. } | RequestError::Unreadable { .. })
            }
            Self::Model(error) => *error == ModelError::NoContext,
            // A disaggregated server would give only a part of each answer.
            Self::KeyRequired | Self::Disaggregated => false,
            Self::Answer { .. }
            | Self::NoTokens
            | Self::NotSglang
            | Self::EmptyRequest { .. }
            | Self::OtherRanks { .. }
            | Self::NoBlockSize
            | Self::NoPageSize
            | Self::GeneratesNothing
            | Self::ImagesNeedText
            | Self::NoMetrics => true,
        }
    }
}

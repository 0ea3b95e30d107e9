//! Errors of a server that is asked for what it is.

use crate::models::ModelError;
use crate::server::AskError;

/// A reason that a server can't be used, for operators.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// It does not answer as it should.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// It has not the one model that is meant.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An answer of another form.
    #[error("its answer to /{path} can't be read: {source}")]
    Answer { path: &'static str, source: serde_json::Error },
    /// It refuses requests without a key, or with this one.
    #[error("it wants a key (api-key-file=FILE behind its address)")]
    WantsKey,
    /// A vLLM without the path for tokens.
    #[error(
        "it takes no tokens at /inference/v1/generate: start it with --enable-scale-out, or give it requests \
         as they come (mode=chat behind its address)"
    )]
    NoTokens,
    /// It has not the path of SGLang for tokens.
    #[error("it takes no tokens at /generate: is it SGLang?")]
    NotSglang,
    /// It does not refuse an empty request as it should.
    #[error("it answers {status} to an empty request at /{path}")]
    EmptyRequest { status: u16, path: &'static str },
    /// A vLLM that does not tell its blocks' size.
    #[error("it does not tell its blocks' size (vllm:cache_config_info of /metrics)")]
    NoBlockSize,
    /// An SGLang whose blocks have no size.
    #[error("its blocks have no size (page_size of /server_info)")]
    NoPageSize,
    /// Its model embeds, for instance.
    #[error("its model generates nothing")]
    GeneratesNothing,
    /// It is one side of a disaggregated SGLang.
    #[error("it does a part of each answer alone (--disaggregation-mode)")]
    Disaggregated,
    /// It has no metrics.
    #[error("it does not tell its load at /metrics: start it with --enable-metrics")]
    NoMetrics,
}

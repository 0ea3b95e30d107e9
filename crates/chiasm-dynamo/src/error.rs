//! Reasons that a worker of Dynamo can't be served.

/// A reason that a worker is not served, for the log. Texts of the worker are shortened before they
/// get here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    /// A value in etcd is malformed.
    #[error("its entry for {what} differs from those of Dynamo 1.6: {source}")]
    Unreadable { what: &'static str, source: serde_json::Error },
    /// The endpoint accepts requests over NATS.
    #[error("it accepts requests over NATS; only TCP is supported (--request-plane tcp)")]
    OverNats,
    /// The endpoint accepts requests over an unknown transport.
    #[error("it accepts requests over '{}'; only TCP is supported", .0.join(", "))]
    Transport(Vec<String>),
    /// The worker expects another encoding of requests.
    #[error("it reads requests as {0}; only msgpack is supported")]
    Codec(String),
    /// The worker does not report the encoding of requests.
    #[error(
        "it does not report msgpack as its codec, unlike workers of Dynamo 1.6: \
         it has another version, which is not supported"
    )]
    NoCodec,
    /// The endpoint has no path.
    #[error("it does not report an address for requests")]
    NoPlace,
    /// The endpoint's address is malformed.
    #[error("'{0}' is not an address for requests")]
    Place(String),
    /// The worker accepts something other than tokens, for example text.
    #[error("it accepts {0} instead of tokens")]
    Input(String),
    /// The model is for something other than generation, for example embeddings.
    #[error("its model is for {0} instead of chat or completions")]
    Kind(String),
    /// The worker computes one stage of requests.
    #[error(
        "it computes one stage of requests (prefill, decode or encode); \
         only workers that compute whole requests are supported"
    )]
    OneStage,
    /// The card has no block size.
    #[error("it does not report its block size (kv_cache_block_size)")]
    NoBlockSize,
    /// The card has no context.
    #[error("it does not report its model's context (context_length)")]
    NoContext,
    /// The operator has named another model.
    #[error("it serves '{found}' instead of '{wanted}'")]
    OtherModel { found: String, wanted: String },
    /// A file of the worker's model differs from that of the served model.
    #[error(
        "the {file} of its model '{model}' differs from the local one \
         (with model=NAME after the address only names are compared)"
    )]
    OtherFile { file: &'static str, model: String },
    /// A file that would identify the model is missing on one side.
    #[error(
        "its model '{model}' can't be compared with the local one, because a {file} is missing \
         (with model=NAME after the address only names are compared)"
    )]
    UnknownFile { file: &'static str, model: String },
    /// The first worker in use has another model.
    #[error(
        "it serves '{found}', but '{served}' is already in use; choose one with model=NAME after \
         the address"
    )]
    SecondModel { found: String, served: String },
}

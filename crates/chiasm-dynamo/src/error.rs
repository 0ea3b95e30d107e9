//! Reasons that a worker of Dynamo can't be served.

/// A reason that a worker is not served, for the log. Texts of the worker are shortened before they
/// get here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    /// A value in etcd is malformed.
    #[error("what it says of {what} is not what workers of Dynamo 1.6 say: {source}")]
    Unreadable { what: &'static str, source: serde_json::Error },
    /// The endpoint takes requests over NATS.
    #[error("it takes requests over NATS, and only TCP is known here (--request-plane tcp)")]
    OverNats,
    /// The endpoint takes requests over an unknown transport.
    #[error("it takes requests over '{}', and only TCP is known here", .0.join(", "))]
    Transport(Vec<String>),
    /// The worker expects another encoding of requests.
    #[error("it reads requests as {0}, and only msgpack is known here")]
    Codec(String),
    /// The worker does not report the encoding of requests.
    #[error(
        "it does not say that it reads msgpack, as workers of Dynamo 1.6 do: it is of another \
         version, which is not tested here"
    )]
    NoCodec,
    /// The endpoint has no path.
    #[error("it does not say where it takes requests")]
    NoPlace,
    /// The endpoint's address is malformed.
    #[error("'{0}' is no place where requests are taken")]
    Place(String),
    /// The worker takes something else than tokens, for example text.
    #[error("it takes {0}, and is given tokens here")]
    Input(String),
    /// The model is for something else, for example embeddings.
    #[error("it is for {0}, and not for chat or completions")]
    Kind(String),
    /// The worker computes one stage of requests.
    #[error(
        "it is one half of a prompt's way (prefill, decode or encode): only workers that do all \
         of it are served here"
    )]
    OneStage,
    /// The card has no block size.
    #[error("it does not tell its blocks' size (kv_cache_block_size)")]
    NoBlockSize,
    /// The card has no context.
    #[error("it does not tell its model's context (context_length)")]
    NoContext,
    /// The operator has named another model.
    #[error("it serves '{found}', and not '{wanted}'")]
    OtherModel { found: String, wanted: String },
    /// A file of the worker's model differs from that of the served model.
    #[error(
        "the {file} of its model '{model}' is another one than here (model=NAME behind the address \
         takes workers by the name alone)"
    )]
    OtherFile { file: &'static str, model: String },
    /// A file that would identify the model is missing on one side.
    #[error(
        "whether its model '{model}' is the one that is served here can't be told, for want of a \
         {file} on both sides (model=NAME behind the address takes workers by the name alone)"
    )]
    UnknownFile { file: &'static str, model: String },
    /// The first served worker has another model.
    #[error(
        "it serves '{found}', and '{served}' is served already: say which one by model=NAME behind \
         the address"
    )]
    SecondModel { found: String, served: String },
}

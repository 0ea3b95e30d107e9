//! Why a worker of Dynamo can't be served.

/// A reason that a worker is not served, for the log. Texts of the worker are cut short before they
/// get here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    /// A value in etcd has another form.
    #[error("what it says of {what} is not what workers of Dynamo 1.6 say: {source}")]
    Unreadable { what: &'static str, source: serde_json::Error },
    /// Its endpoint is reached over NATS.
    #[error("it takes requests over NATS, and only TCP is known here (--request-plane tcp)")]
    OverNats,
    /// Its endpoint is reached over something unknown.
    #[error("it takes requests over '{}', and only TCP is known here", .0.join(", "))]
    Transport(Vec<String>),
    /// Its requests are encoded in another way.
    #[error("it reads requests as {0}, and only msgpack is known here")]
    Codec(String),
    /// It does not name the encoding of its requests.
    #[error(
        "it does not say that it reads msgpack, as workers of Dynamo 1.6 do: it is of another \
         version, which is not tested here"
    )]
    NoCodec,
    /// Its endpoint has no path.
    #[error("it does not say where it takes requests")]
    NoPlace,
    /// Its endpoint can't be connected to.
    #[error("'{0}' is no place where requests are taken")]
    Place(String),
    /// It takes text, for instance.
    #[error("it takes {0}, and is given tokens here")]
    Input(String),
    /// Its model embeds, for instance.
    #[error("it is for {0}, and not for chat or completions")]
    Kind(String),
    /// It computes one stage of requests.
    #[error(
        "it is one half of a prompt's way (prefill, decode or encode): only workers that do all of it \
         are served here"
    )]
    OneStage,
    /// Its card has no block size.
    #[error("it does not tell its blocks' size (kv_cache_block_size)")]
    NoBlockSize,
    /// Its card has no context.
    #[error("it does not tell its model's context (context_length)")]
    NoContext,
    /// The operator has named another model.
    #[error("it serves '{found}', and not '{wanted}'")]
    OtherModel { found: String, wanted: String },
    /// A file of its model differs from that of the served model.
    #[error(
        "the {file} of its model '{model}' is another one than here (model=NAME behind the address \
         takes workers by the name alone)"
    )]
    OtherFile { file: &'static str, model: String },
    /// A file that would tell its model from others is not known of both sides.
    #[error(
        "whether its model '{model}' is the one that is served here can't be told, for want of a \
         {file} on both sides (model=NAME behind the address takes workers by the name alone)"
    )]
    UnknownFile { file: &'static str, model: String },
    /// The first worker has another model.
    #[error(
        "it serves '{found}', and '{served}' is served already: say which one by model=NAME behind \
         the address"
    )]
    SecondModel { found: String, served: String },
}

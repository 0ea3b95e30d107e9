//! The description of a worker and its model in etcd, and the checks before a worker is served.

use std::fs;
use std::path::Path;

use chiasm_types::BlockSize;
use serde::Deserialize;

use crate::error::NotServed;

/// The checksums of the files that distinguish one model from another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelFiles {
    /// The blake3 hash of `config.json`, in hex.
    config: Option<String>,
    /// The blake3 hash of `tokenizer.json`, in hex.
    tokenizer: Option<String>,
}

impl ModelFiles {
    /// Reads the files in a model's folder. Files that can't be read have no checksum.
    pub fn read(folder: &Path) -> Self {
        let checksum =
            |name| Some(blake3::hash(&fs::read(folder.join(name)).ok()?).to_hex().to_string());
        Self { config: checksum("config.json"), tokenizer: checksum("tokenizer.json") }
    }
}

/// The address and the protocol of an endpoint.
#[derive(Debug, Deserialize)]
pub(crate) struct Instance {
    pub(crate) instance_id: u64,
    transport: Transport,
    request_plane_codec: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    Tcp(String),
    NatsTcp(serde::de::IgnoredAny),
    #[serde(untagged)]
    Other(serde_json::Map<String, serde_json::Value>),
}

impl Instance {
    /// Returns `HOST:PORT` and the path after it.
    ///
    /// # Errors
    /// Returns [`NotServed`] if the endpoint's protocol is not supported.
    pub(crate) fn endpoint(&self) -> Result<(&str, &str), NotServed> {
        let tcp = match &self.transport {
            Transport::Tcp(tcp) => tcp,
            Transport::NatsTcp(_) => {
                return Err(NotServed::OverNats);
            }
            Transport::Other(other) => {
                return Err(NotServed::Transport(other.keys().take(4).cloned().collect()));
            }
        };
        match self.request_plane_codec.as_deref() {
            Some("msgpack") => {}
            Some(codec) => {
                return Err(NotServed::Codec(shortened(codec)));
            }
            None => {
                return Err(NotServed::NoCodec);
            }
        }
        let (address, path) = tcp.split_once('/').ok_or(NotServed::NoPlace)?;
        let port = address
            .rsplit_once(':')
            .and_then(|(host, port)| port.parse::<u16>().ok().filter(|_| !host.is_empty()));
        match port {
            Some(1..) if !path.is_empty() && path.len() <= usize::from(u16::MAX) => {
                Ok((address, path))
            }
            _ => Err(NotServed::Place(shortened(tcp))),
        }
    }
}

/// The value of `v1/mdc/…`: a model of a worker.
#[derive(Debug, Deserialize)]
pub(crate) struct ModelEntry {
    pub(crate) card_json: Card,
}

/// The used part of `ModelDeploymentCard` of Dynamo 1.6.
#[derive(Debug, Deserialize)]
pub(crate) struct Card {
    pub(crate) display_name: String,
    model_info: Option<ConfigFile>,
    tokenizer: Option<TokenizerFile>,
    #[serde(default)]
    architectural_max_context_length: usize,
    #[serde(default)]
    context_length: usize,
    kv_cache_block_size: u32,
    model_type: String,
    model_input: String,
    worker_type: Option<String>,
    #[serde(default)]
    needs: Vec<serde_json::Value>,
    #[serde(default)]
    pub(crate) runtime_config: RuntimeConfig,
}

#[derive(Debug, Deserialize)]
struct ConfigFile {
    hf_config_json: Option<CheckedFile>,
}

#[derive(Debug, Deserialize)]
struct TokenizerFile {
    hf_tokenizer_json: Option<CheckedFile>,
}

#[derive(Debug, Deserialize)]
struct CheckedFile {
    checksum: String,
}

/// The start parameters of a worker's engine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RuntimeConfig {
    context_length: usize,
    pub(crate) total_kv_blocks: Option<u64>,
    pub(crate) max_num_seqs: Option<u64>,
    pub(crate) max_num_batched_tokens: Option<u64>,
    data_parallel_size: Option<u64>,
    enable_local_indexer: bool,
    kv_event_publishing_enabled: bool,
}

impl Card {
    /// Returns the maximum number of tokens of prompt and answer together, if reported.
    pub(crate) fn context(&self) -> Option<usize> {
        let reported = [
            self.context_length,
            self.runtime_config.context_length,
            self.architectural_max_context_length,
        ];
        reported.into_iter().find(|tokens| *tokens > 0)
    }

    pub(crate) fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.kv_cache_block_size)
    }

    /// Returns the reason that the worker's events do not describe its cache, if there is one.
    pub(crate) fn no_events(&self) -> Option<&'static str> {
        let RuntimeConfig {
            kv_event_publishing_enabled,
            enable_local_indexer,
            data_parallel_size,
            ..
        } = self.runtime_config;
        match data_parallel_size {
            _ if !kv_event_publishing_enabled => Some("it publishes no KV events"),
            _ if !enable_local_indexer => {
                Some("it can't report its whole cache (no local indexer)")
            }
            Some(2..) => {
                Some("it has several engines (--data-parallel-size) and selects one by itself")
            }
            _ => None,
        }
    }

    /// Checks that a worker of this model can be served here.
    ///
    /// `name` is the workers' name of the model, if the operator has given it. Otherwise the
    /// model's files have to equal those of the model served here.
    ///
    /// # Errors
    /// Returns [`NotServed`] with the reason.
    pub(crate) fn check(&self, name: Option<&str>, files: &ModelFiles) -> Result<(), NotServed> {
        if self.model_input != "Tokens" {
            return Err(NotServed::Input(shortened(&self.model_input)));
        }
        if !self.model_type.split('|').any(|kind| matches!(kind.trim(), "Chat" | "Completions")) {
            return Err(NotServed::Kind(shortened(&self.model_type)));
        }
        if self.worker_type.as_deref().is_some_and(|kind| kind != "aggregated")
            || !self.needs.is_empty()
        {
            return Err(NotServed::OneStage);
        }
        if self.block_size().is_none() {
            return Err(NotServed::NoBlockSize);
        }
        if self.context().is_none() {
            return Err(NotServed::NoContext);
        }
        match name {
            Some(name) if name == self.display_name => Ok(()),
            Some(name) => Err(NotServed::OtherModel {
                found: shortened(&self.display_name),
                wanted: name.to_owned(),
            }),
            None => self.check_files(files),
        }
    }

    fn check_files(&self, files: &ModelFiles) -> Result<(), NotServed> {
        let config = self.model_info.as_ref().and_then(|info| info.hf_config_json.as_ref());
        let tokenizer = self.tokenizer.as_ref().and_then(|info| info.hf_tokenizer_json.as_ref());
        for (file, theirs, ours) in [
            ("tokenizer.json", tokenizer, &files.tokenizer),
            ("config.json", config, &files.config),
        ] {
            let theirs = theirs.and_then(|file| file.checksum.strip_prefix("blake3:"));
            match (theirs, ours) {
                (Some(theirs), Some(ours)) if theirs == ours => {}
                (Some(_), Some(_)) => {
                    let model = shortened(&self.display_name);
                    return Err(NotServed::OtherFile { file, model });
                }
                _ => {
                    let model = shortened(&self.display_name);
                    return Err(NotServed::UnknownFile { file, model });
                }
            }
        }
        Ok(())
    }
}

/// Returns the beginning of a worker's text without control characters, for logs.
fn shortened(text: &str) -> String {
    text.chars().take(100).filter(|char| !char.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded from a mocker of Dynamo 1.6.1.
    pub(crate) const CARD: &str = include_str!("../tests/recorded/mdc.json");
    const INSTANCE: &str = include_str!("../tests/recorded/instance.json");

    fn files() -> ModelFiles {
        ModelFiles {
            config: Some(
                "229c65a3e994c497ae3a6755c1ac648dce5d2b4d63e5c0293438bd48a3859e3a".to_owned(),
            ),
            tokenizer: Some(
                "8f89662f9f551a32b258adaa56887cd1245a4827ff2b68868317addc81c2d8f6".to_owned(),
            ),
        }
    }

    fn check(from: &str, to: &str, name: Option<&str>) -> String {
        assert!(CARD.contains(from), "{from}");
        let entry: ModelEntry = serde_json::from_str(&CARD.replacen(from, to, 1)).unwrap();
        let checked = entry.card_json.check(name, &files());
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn card_of_a_mocker_is_accepted() {
        let entry: ModelEntry = serde_json::from_str(CARD).unwrap();
        let card = &entry.card_json;
        assert_eq!(
            (card.context(), card.block_size().unwrap().get(), card.no_events()),
            (Some(8192), 16, None)
        );
        assert_eq!(card.runtime_config.total_kv_blocks, Some(16384));
        assert_eq!(check("tiny", "tiny", None), "");
        assert_eq!(check("tiny", "tiny", Some("tiny")), "");
    }

    #[test]
    fn unsupported_card_is_refused_with_the_reason() {
        for (from, to, name, reason) in [
            (r#""model_input":"Tokens""#, r#""model_input":"Text""#, None, "it accepts Text"),
            (r#""Chat | Completions""#, r#""Embedding""#, None, "its model is for Embedding"),
            ("aggregated", "prefill", None, "one stage"),
            (r#""needs":[]"#, r#""needs":["prefill"]"#, None, "one stage"),
            (r#""kv_cache_block_size":16"#, r#""kv_cache_block_size":0"#, None, "its block size"),
            (r#""architectural_max_context_length":8192"#, r#""x":0"#, None, "its model's context"),
            ("blake3:8f", "blake3:9f", None, "the tokenizer.json of its model 'tiny' differs"),
            ("blake3:22", "blake3:23", None, "the config.json of its model 'tiny' differs"),
            ("hf_tokenizer_json", "gguf", None, "can't be compared"),
            ("tiny", "tiny", Some("large"), "it serves 'tiny' instead of 'large'"),
        ] {
            let error = check(from, to, name);
            assert!(error.contains(reason), "{from}: {error}");
        }
        assert_eq!(check("blake3:8f", "blake3:9f", Some("tiny")), "", "the name is enough");
    }

    #[test]
    fn endpoint_without_tcp_or_msgpack_is_refused() {
        let endpoint = |from: &str, to: &str| {
            assert!(INSTANCE.contains(from), "{from}");
            let instance: Instance = serde_json::from_str(&INSTANCE.replacen(from, to, 1)).unwrap();
            instance
                .endpoint()
                .map(|(address, path)| format!("{address} {path}"))
                .unwrap_or_else(|error| error.to_string())
        };
        assert_eq!(
            endpoint("tcp", "tcp"),
            "127.0.0.1:44323 13b0a212d3d50c06/dynamo/backend/generate"
        );
        for (from, to, reason) in [
            (r#""tcp":"#, r#""nats_tcp":"#, "over NATS"),
            (r#""tcp":"#, r#""quic":"#, "over 'quic'"),
            (r#""msgpack""#, r#""json""#, "as json"),
            (r#","request_plane_codec":"msgpack""#, "", "another version"),
            ("127.0.0.1:44323", "127.0.0.1", "address"),
            ("127.0.0.1:44323/", "127.0.0.1:44323", "address"),
            ("127.0.0.1:44323", ":44323", "address"),
        ] {
            let error = endpoint(from, to);
            assert!(error.contains(reason), "{to}: {error}");
        }
    }
}

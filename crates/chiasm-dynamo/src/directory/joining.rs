//! Joins registered keys to workers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{EventSource, Events, KINDS, Worker, Workers};
use crate::card::{Instance, ModelEntry, ModelFiles};
use crate::error::NotServed;
use crate::wire::Endpoint;

/// Keys and their values.
pub(super) type KeyValues = BTreeMap<String, Arc<[u8]>>;

const KV_EVENTS: &str = "kv-events";

/// The state of joining the keys of one namespace.
#[derive(Debug)]
pub(super) struct Joiner {
    namespace: String,
    /// The model's name from the operator.
    model: Option<String>,
    files: ModelFiles,
    /// The model's name at the first worker in use.
    served: Option<String>,
    /// The logged reasons that workers are not used, by worker.
    refused: BTreeMap<String, String>,
}

/// The value of `v1/event_channels/…`: the endpoint of a publisher.
#[derive(Deserialize)]
struct ChannelEntry {
    topic: String,
    instance_id: u64,
    transport: ChannelTransport,
}

#[derive(Deserialize)]
struct ChannelTransport {
    kind: String,
    config: Option<ZmqConfig>,
}

#[derive(Deserialize)]
struct ZmqConfig {
    endpoint: Option<String>,
}

/// The value of `v1/event_sources/…`: the worker of a publisher.
#[derive(Deserialize)]
struct SourceEntry {
    topic: String,
    publisher_id: u64,
    metadata: SourceMetadata,
}

#[derive(Deserialize)]
struct SourceMetadata {
    worker: SourceWorker,
    recovery_target: Option<Instance>,
}

#[derive(Deserialize)]
struct SourceWorker {
    worker_id: u64,
    dp_rank: u32,
}

impl Joiner {
    pub(super) fn new(namespace: String, model: Option<String>, files: ModelFiles) -> Self {
        Self { namespace, model, files, served: None, refused: BTreeMap::new() }
    }

    /// Returns the workers that these keys describe, in the order of [`KINDS`]. A worker without a
    /// registered endpoint is left out.
    pub(super) fn join(
        &mut self,
        [models, instances, sources, channels]: [&KeyValues; 4],
    ) -> Workers {
        let sources = sources_by_worker(sources, channels);
        let mut by_name = BTreeMap::new();
        let mut refused = BTreeMap::new();
        for (key, model) in models {
            let Some(name) = key
                .strip_prefix(KINDS[0])
                .and_then(|key| key.strip_prefix(&self.namespace)?.strip_prefix('/'))
            else {
                continue;
            };
            // A key with more parts belongs to an adapter of a worker.
            if name.split('/').count() != 3 {
                continue;
            }
            let Some(instance) = instances.get(&format!("{}{}/{name}", KINDS[1], self.namespace))
            else {
                continue;
            };
            match self.worker(model, instance, &sources) {
                Ok(worker) => drop(by_name.insert(name.to_owned(), Arc::new(worker))),
                Err(error) => drop(refused.insert(name.to_owned(), error.to_string())),
            }
        }
        for (worker, why) in &refused {
            if self.refused.get(worker) != Some(why) {
                tracing::warn!(worker, why, "a Dynamo worker is not used");
            }
        }
        self.refused = refused;
        Workers { by_name }
    }

    fn worker(
        &mut self,
        model: &[u8],
        instance: &[u8],
        sources: &BTreeMap<u64, EventSource>,
    ) -> Result<Worker, NotServed> {
        let ModelEntry { card_json: card } = read(model, "the model")?;
        let instance: Instance = read(instance, "the endpoint")?;
        let (address, path) = instance.endpoint()?;
        card.check(self.model.as_deref(), &self.files)?;
        let served = self.served.get_or_insert_with(|| card.display_name.clone());
        if *served != card.display_name {
            return Err(NotServed::SecondModel {
                found: card.display_name,
                served: served.clone(),
            });
        }
        let context = card.context().ok_or(NotServed::NoContext)?;
        let block_size = card.block_size().ok_or(NotServed::NoBlockSize)?;
        let number = |number: Option<u64>| number.and_then(|number| usize::try_from(number).ok());
        let events = match (card.no_events(), sources.get(&instance.instance_id)) {
            (Some(why), _) => Events::None(why),
            (None, Some(source)) => Events::At(source.clone()),
            (None, None) => Events::Expected,
        };
        Ok(Worker {
            endpoint: Endpoint { address: address.to_owned(), path: path.to_owned() },
            context,
            block_size,
            total_blocks: card.runtime_config.total_kv_blocks.unwrap_or(0),
            max_running: number(card.runtime_config.max_num_seqs).unwrap_or(0),
            max_batched_tokens: number(card.runtime_config.max_num_batched_tokens)
                .unwrap_or(context),
            events,
            model: card.display_name,
        })
    }
}

/// Returns the event sources by worker. A source that can't be queried is left out.
fn sources_by_worker(sources: &KeyValues, channels: &KeyValues) -> BTreeMap<u64, EventSource> {
    let entries =
        channels.values().filter_map(|value| read::<ChannelEntry>(value, "a channel").ok());
    let zmq = |entry: ChannelEntry| {
        let is_known = entry.topic == KV_EVENTS && entry.transport.kind == "Zmq";
        let endpoint = entry.transport.config?.endpoint.filter(|_| is_known)?;
        endpoint.starts_with("tcp://").then_some((entry.instance_id, endpoint))
    };
    let channels: BTreeMap<u64, String> = entries.filter_map(zmq).collect();
    let sources = sources.values().filter_map(|value| read::<SourceEntry>(value, "a source").ok());
    let source = |SourceEntry { topic, publisher_id, metadata }: SourceEntry| {
        let SourceMetadata { worker: SourceWorker { worker_id, dp_rank }, recovery_target } =
            metadata;
        let target = recovery_target.filter(|_| topic == KV_EVENTS)?;
        let (address, path) = target.endpoint().ok()?;
        let query = Endpoint { address: address.to_owned(), path: path.to_owned() };
        let channel = channels.get(&publisher_id).cloned();
        Some((worker_id, EventSource { query, worker_id, dp_rank, channel }))
    };
    sources.filter_map(source).collect()
}

fn read<T: DeserializeOwned>(value: &[u8], what: &'static str) -> Result<T, NotServed> {
    serde_json::from_slice(value).map_err(|source| NotServed::Unreadable { what, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All keys of a mocker of Dynamo 1.6.1.
    const KEYS: &str = include_str!("../../tests/recorded/keys.json");
    const ID: &str = "13b0a212d3d50c06";

    /// Returns the recorded keys by kind, after a change of their text.
    fn keys(from: &str, to: &str) -> [KeyValues; 4] {
        assert!(KEYS.contains(from), "{from}");
        let all: BTreeMap<String, serde_json::Value> =
            serde_json::from_str(&KEYS.replace(from, to)).unwrap();
        KINDS.map(|kind| {
            all.iter()
                .filter(|(key, _)| key.starts_with(kind))
                .map(|(key, value)| (key.clone(), value.to_string().into_bytes().into()))
                .collect()
        })
    }

    fn join(joiner: &mut Joiner, keys: &[KeyValues; 4]) -> Workers {
        joiner.join(keys.each_ref())
    }

    fn joiner() -> Joiner {
        Joiner::new("dynamo".to_owned(), Some("tiny".to_owned()), ModelFiles::default())
    }

    #[test]
    fn keys_of_a_mocker_are_a_worker_with_events() {
        let workers = join(&mut joiner(), &keys("tiny", "tiny"));
        assert_eq!(workers.names().collect::<Vec<_>>(), [format!("backend/generate/{ID}")]);
        let worker = &workers.by_name[&format!("backend/generate/{ID}")];
        assert_eq!(worker.endpoint.address, "127.0.0.1:44323");
        assert_eq!(worker.endpoint.path, format!("{ID}/dynamo/backend/generate"));
        assert_eq!(
            (worker.context, worker.block_size.get(), worker.total_blocks),
            (8192, 16, 16384)
        );
        assert_eq!(
            (worker.max_running, worker.max_batched_tokens, worker.model.as_str()),
            (256, 8192, "tiny")
        );
        let Events::At(source) = &worker.events else { panic!("{:?}", worker.events) };
        assert_eq!(
            source.query.path,
            format!("{ID}/dynamo/backend/worker_kv_query_source_86c1c4cffb149")
        );
        assert_eq!((source.worker_id, source.dp_rank), (1418812084368772102, 0));
        assert_eq!(source.channel.as_deref(), Some("tcp://127.0.0.1:46565"));
    }

    #[test]
    fn keys_may_come_in_any_order() {
        let [models, instances, sources, channels] = keys("tiny", "tiny");
        let none = KeyValues::new();
        let mut joiner = joiner();
        assert!(joiner.join([&models, &none, &sources, &channels]).by_name.is_empty());
        assert!(joiner.join([&none, &instances, &sources, &channels]).by_name.is_empty());
        let events = |workers: Workers| workers.by_name.values().next().unwrap().events.clone();
        assert_eq!(events(joiner.join([&models, &instances, &none, &channels])), Events::Expected);
        let unpublished = events(joiner.join([&models, &instances, &sources, &none]));
        assert!(
            matches!(unpublished, Events::At(EventSource { channel: None, .. })),
            "events can be queried without a channel"
        );
    }

    #[test]
    fn unsupported_key_refuses_only_its_worker() {
        for (from, to, why) in [
            (
                r#""kv_cache_block_size":16"#,
                r#""kv_cache_block_size":"many""#,
                "differs from those of Dynamo 1.6",
            ),
            (
                r#""tcp":"127.0.0.1:44323/13b0a212d3d50c06/dynamo/backend/generate""#,
                r#""nats_tcp":"x""#,
                "over NATS",
            ),
        ] {
            let mut joiner = joiner();
            assert!(join(&mut joiner, &keys(from, to)).by_name.is_empty());
            let refused: Vec<&String> = joiner.refused.values().collect();
            assert!(refused.len() == 1 && refused[0].contains(why), "{refused:?}");
        }
        let events = |from: &str, to: &str| {
            let workers = join(&mut joiner(), &keys(from, to));
            workers.by_name.values().next().unwrap().events.clone()
        };
        for (from, to) in [
            (r#""kv_event_publishing_enabled":true"#, r#""kv_event_publishing_enabled":false"#),
            (r#""enable_local_indexer":true"#, r#""enable_local_indexer":false"#),
            (r#""data_parallel_size":1"#, r#""data_parallel_size":2"#),
        ] {
            assert!(matches!(events(from, to), Events::None(_)), "{to}");
        }
        assert_eq!(events(r#""publisher_id":"#, r#""publisher":"#), Events::Expected);
    }

    #[test]
    fn worker_of_a_second_model_is_refused() {
        let files = ModelFiles::default();
        let mut joiner = Joiner {
            served: Some("other".to_owned()),
            ..Joiner::new("dynamo".to_owned(), None, files)
        };
        joiner.model = Some("tiny".to_owned());
        assert!(join(&mut joiner, &keys("tiny", "tiny")).by_name.is_empty());
        assert!(
            joiner.refused.values().all(|why| why.contains("'other' is already in use")),
            "{:?}",
            joiner.refused
        );
    }

    proptest::proptest! {
        #[test]
        fn damaged_keys_are_a_worker_or_refused(
            at: usize,
            with in "[\\PC\\x00-\\x7f]{0,6}",
            length in 0_usize..20,
        ) {
            let mut keys = keys("tiny", "tiny");
            let kind = at % 4;
            for value in keys[kind].values_mut() {
                let mut damaged = value.to_vec();
                let at = at % damaged.len();
                let end = (at + length).min(damaged.len());
                damaged.splice(at..end, with.bytes());
                *value = damaged.into();
            }
            proptest::prop_assert!(join(&mut joiner(), &keys).by_name.len() <= 1);
        }
    }
}

//! KV events as a listener receives them.

use std::collections::HashMap;

use bytes::Bytes;
use chiasm_engine::wire::EngineReady;
use chiasm_kv::event::{self, BlockStored, ExternalHash, ExtraKey, KvEvent, KvEventBatch};
use chiasm_sim_engine::{SimConfig, SimEngine};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use crate::frontend::{Frontend, image, image_request, soon, text_request, tokens};

struct Listener {
    events: SubSocket,
    replay: DealerSocket,
    topic: &'static str,
}

/// A sequence number and its batch.
type Batch = (u64, KvEventBatch);

fn batch(sequence: &Bytes, payload: &Bytes) -> Batch {
    (u64::from_be_bytes(sequence[..].try_into().unwrap()), event::decode(payload).unwrap())
}

impl Listener {
    async fn connect(ready: &EngineReady, topic: &'static str) -> Self {
        let config = ready.kv_events_config.as_ref().unwrap();
        let local = |endpoint: &str| endpoint.replace('*', "127.0.0.1");
        let mut events = SubSocket::new();
        let mut replay = DealerSocket::new();
        events.subscribe(topic).await.unwrap();
        events.connect(&local(&config.endpoint)).await.unwrap();
        replay.connect(&local(config.replay_endpoint.as_ref().unwrap())).await.unwrap();
        Self { events, replay, topic }
    }

    async fn next(&mut self) -> Batch {
        let frames = soon("KV events", self.events.recv()).await.unwrap().into_vec();
        let [topic, sequence, payload] = &frames[..] else { panic!("{frames:?}") };
        assert_eq!(topic, self.topic);
        batch(sequence, payload)
    }

    async fn replay(&mut self, from: u64) -> Vec<Batch> {
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
        self.replay.send(request).await.unwrap();
        let mut batches = Vec::new();
        loop {
            let frames = soon("a replay", self.replay.recv()).await.unwrap().into_vec();
            let [empty, topic, sequence, payload] = &frames[..] else { panic!("{frames:?}") };
            assert!(empty.is_empty());
            if sequence[..] == [0xff; 8] {
                assert!(topic.is_empty() && payload.is_empty());
                return batches;
            }
            assert_eq!(topic, self.topic);
            batches.push(batch(sequence, payload));
        }
    }
}

async fn engine(change: impl FnOnce(&mut SimConfig)) -> (Frontend, SimEngine, Listener) {
    let mut frontend = Frontend::bind().await;
    let mut config = frontend.config();
    change(&mut config);
    let topic = if config.kv_events.as_ref().unwrap().topic.is_empty() { "" } else { "kv@sim" };
    let engine = SimEngine::start(config);
    let ready = frontend.accept(0).await;
    let listener = Listener::connect(&ready, topic).await;
    (frontend, engine, listener)
}

fn stored(batch: &KvEventBatch) -> &BlockStored {
    let [KvEvent::BlockStored(stored)] = &batch.events[..] else { panic!("{batch:?}") };
    stored
}

/// Waits until the subscription is active, and returns a replay of the batches after the first
/// received one. Earlier batches may be missed by the subscription, but not by a replay.
async fn wait_for_subscription(frontend: &mut Frontend, listener: &mut Listener) -> Vec<Batch> {
    for attempt in 0.. {
        frontend.run(&text_request("probe", tokens(500 + attempt, 40))).await;
        let received =
            tokio::time::timeout(std::time::Duration::from_millis(200), listener.next()).await;
        if let Ok((sequence, _)) = received {
            return listener.replay(sequence + 1).await;
        }
    }
    unreachable!()
}

#[tokio::test]
async fn image_request_stores_blocks_with_extra_keys() {
    let (mut frontend, _engine, mut listener) =
        engine(|config| config.kv_events.as_mut().unwrap().topic = "kv@sim".into()).await;
    let request = image_request("1", "aa", Some(image(16, 20)));
    frontend.run(&request).await;
    let batches = listener.replay(0).await;
    let (sequence, first) = &batches[0];
    assert_eq!((*sequence, first.data_parallel_rank), (0, Some(0)));
    let prompt = stored(first);
    assert_eq!(prompt.block_hashes.len(), 3);
    assert_eq!(prompt.parent_block_hash, None);
    assert_eq!(prompt.token_ids, request.prompt_token_ids[..96]);
    assert_eq!(prompt.block_size, 32);
    let key = |offset| Some(vec![ExtraKey::Media { identifier: "aa".into(), offset }]);
    assert_eq!(prompt.extra_keys, Some(vec![key(20), key(-12), key(-44)]));
    // Generated tokens fill further blocks; the fourth still touches the image.
    let next = stored(&batches[1].1);
    assert_eq!(next.parent_block_hash.as_ref(), prompt.block_hashes.last());
    assert_eq!(next.extra_keys, Some(vec![key(-76)]));
}

#[tokio::test]
async fn missed_batches_can_be_replayed() {
    let (mut frontend, _engine, mut listener) =
        engine(|config| config.faults.drop_kv_batches = 20..23).await;
    wait_for_subscription(&mut frontend, &mut listener).await;
    let mut received = Vec::new();
    let mut count = 0;
    while received.last().is_none_or(|(sequence, _)| *sequence < 25) {
        count += 1;
        frontend.run(&text_request("more", tokens(count, 40))).await;
        // Each such request stores a block of its prompt, and later one of its answer.
        received.push(listener.next().await);
        let (last, _) = received.last().unwrap();
        assert!(!(20..23).contains(last));
    }
    let replayed = listener.replay(18).await;
    assert_eq!(
        replayed.iter().map(|(sequence, _)| *sequence).take(8).collect::<Vec<_>>(),
        (18..26).collect::<Vec<_>>()
    );
    for (sequence, batch) in &received {
        if let Some((_, same)) = replayed.iter().find(|(other, _)| other == sequence) {
            assert_eq!(batch, same);
        }
    }
}

#[tokio::test]
async fn replay_buffer_drops_the_oldest_batches() {
    let (mut frontend, _engine, mut listener) =
        engine(|config| config.kv_events.as_mut().unwrap().buffer_steps = 2).await;
    for family in 1..6 {
        let mut request = text_request("a", tokens(family, 40));
        request.sampling_params.max_tokens = 1;
        frontend.run(&request).await;
    }
    let sequences: Vec<u64> =
        listener.replay(0).await.into_iter().map(|(sequence, _)| sequence).collect();
    assert_eq!(sequences, [3, 4]);
    assert_eq!(listener.replay(5).await.len(), 0);
}

#[tokio::test]
async fn evictions_of_a_small_cache_are_published() {
    // 1024 tokens fit exactly: two answers of 300 tokens fit, four do not.
    let (mut frontend, _engine, mut listener) = engine(|config| config.num_blocks = 33).await;
    let mut requests = Vec::new();
    for family in 1..5 {
        let mut request = text_request(&format!("r{family}"), tokens(family, 200));
        request.sampling_params.max_tokens = 300;
        request.sampling_params.eos_token_id = None;
        frontend.add(&request).await;
        requests.push(request);
    }
    let answers = frontend.answers(4).await;
    assert!(answers.values().all(|answer| answer.tokens.len() == 300));
    let mut events =
        answers.values().flat_map(|answer| &answer.outputs).flat_map(|output| &output.events);
    assert!(events.any(|event| event.kind == 3), "no request was preempted");
    assert_eq!(frontend.call("reset_prefix_cache", vec![]).await, Ok(true.into()));
    frontend.run(&text_request("last", tokens(9, 40))).await;

    let mut copies: HashMap<ExternalHash, i32> = HashMap::new();
    let mut cleared = false;
    for (_, batch) in listener.replay(0).await {
        for event in batch.events {
            match event {
                KvEvent::BlockStored(stored) => stored
                    .block_hashes
                    .into_iter()
                    .for_each(|hash| *copies.entry(hash).or_default() += 1),
                KvEvent::BlockRemoved(removed) => {
                    assert_eq!(removed.block_hashes.len(), 1);
                    *copies.get_mut(&removed.block_hashes[0]).unwrap() -= 1;
                }
                KvEvent::AllBlocksCleared => {
                    cleared = true;
                    copies.clear();
                }
                other => panic!("{other:?}"),
            }
            assert!(copies.values().all(|count| *count >= 0));
            assert!(copies.values().sum::<i32>() <= 32);
        }
    }
    assert!(cleared);
    // 40 prompt tokens and 45 of the answer: two full blocks.
    assert_eq!(copies.values().sum::<i32>(), 2);
}

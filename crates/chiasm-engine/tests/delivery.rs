//! The delivery of tensors to a scripted engine, which reads slots as the plugin in vLLM does.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use crate::mock_engine::{MockEngine, Order, connect, report, soon, text_request};
use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutputs, EngineCoreRequest, FailureMessage, FinishReason, MmFeature,
    MmField, MmItem, TensorData, UtilityOutput, Value, WireTensor,
};
use chiasm_engine::{
    AttachError, ClientOptions, EngineClient, EngineEndpoints, ItemDelivery, OutputStream, Plugin,
    SocketDir,
};
use chiasm_transfer::{Arena, ArenaReader, Handle, LAYOUT_VERSION, SHM_DIR, SlotView};
use chiasm_types::{Dtype, Placeholder, TokenId};

const IMAGE_BYTES: usize = 40_000;
const ARENA_BYTES: u64 = 1 << 20;

/// Connects a client to an engine with a receiver cache of this size, if any.
async fn connected(
    dir: &SocketDir,
    receiver_cache_bytes: Option<u64>,
) -> (EngineClient, MockEngine) {
    crate::mock_engine::abort_on_client_panic();
    let options = ClientOptions { receiver_cache_bytes, ..ClientOptions::default() };
    let pending = EngineClient::bind(EngineEndpoints::local("tcp://127.0.0.1:0", dir), options)
        .await
        .unwrap();
    connect(pending, report(), Order::ReportFirst).await
}

/// Attaches an arena. The engine answers the call with the result of `answer`, which gets the
/// arena's name.
async fn attach(
    client: &EngineClient,
    engine: &mut MockEngine,
    answer: impl FnOnce(&str) -> Result<Value, FailureMessage>,
) -> Result<Plugin, AttachError> {
    let answering = async {
        let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a call") };
        assert_eq!(call.method, "chiasm_attach");
        let result = answer(call.args[0].as_str().unwrap());
        let utility_output = Some(UtilityOutput { call_id: call.call_id, result });
        engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
    };
    let attaching = client.attach_arena(ARENA_BYTES, Duration::from_secs(20));
    let (attached, ()) = tokio::join!(attaching, answering);
    attached
}

/// Attaches an arena and returns the engine's reader of it.
async fn attached(client: &EngineClient, engine: &mut MockEngine) -> ArenaReader {
    let mut reader = None;
    let opened = attach(client, engine, |name| {
        reader = Some(ArenaReader::open(name).unwrap());
        let size = ("encoder_cache_tokens".into(), 1234.into());
        Ok(Value::Map(vec![
            ("plugin".into(), "0.1.0".into()),
            ("layout".into(), LAYOUT_VERSION.into()),
            size,
        ]))
    });
    let plugin = Plugin { version: "0.1.0".to_owned(), encoder_cache_tokens: Some(1234) };
    assert_eq!(opened.await.unwrap(), plugin);
    reader.unwrap()
}

fn pixels(tensor: WireTensor) -> MmItem {
    MmItem(vec![("pixel_values".into(), MmField::flat(tensor, IMAGE_BYTES))])
}

fn in_slot(arena: &Arena, value: u8) -> MmItem {
    let mut slot = arena.slot(IMAGE_BYTES).unwrap();
    slot.fill(value);
    pixels(WireTensor::in_slot(Dtype::U8, vec![IMAGE_BYTES], slot.publish()).unwrap())
}

fn in_message(value: u8) -> MmItem {
    pixels(
        WireTensor::new(Dtype::U8, vec![IMAGE_BYTES], Bytes::from(vec![value; IMAGE_BYTES]))
            .unwrap(),
    )
}

/// Creates a request with these items, one token each.
fn request(id: &str, items: Vec<(&str, Option<MmItem>)>) -> EngineCoreRequest {
    let feature = |(index, (key, data)): (usize, (&str, Option<MmItem>))| MmFeature {
        data,
        modality: "image".into(),
        identifier: key.into(),
        position: Placeholder { offset: index, length: 1, is_embed: None },
        mm_hash: Some(key.into()),
    };
    EngineCoreRequest {
        mm_features: items.into_iter().enumerate().map(feature).collect(),
        ..text_request(id)
    }
}

/// The data that the engine received for an item.
#[derive(Debug)]
enum ReceivedData {
    None,
    View(SlotView),
    Bytes(Bytes),
}

impl ReceivedData {
    fn first_byte(&self) -> Option<u8> {
        match self {
            Self::None => None,
            Self::View(view) => Some(view[0]),
            Self::Bytes(bytes) => Some(bytes[0]),
        }
    }
}

/// Receives a request and finishes it. Returns the data of its items.
async fn receive(engine: &mut MockEngine, reader: &ArenaReader) -> Vec<ReceivedData> {
    let request = engine.receive_add().await;
    let data = |feature: MmFeature| {
        let Some(item) = feature.data else { return ReceivedData::None };
        match &item.get("pixel_values").unwrap().tensor().unwrap().data {
            TensorData::Bytes(bytes) => ReceivedData::Bytes(bytes.clone()),
            TensorData::OutOfBand(map) => ReceivedData::View(reader.resolve(&handle(map)).unwrap()),
            TensorData::Slot(_) => panic!("slots are not encoded"),
        }
    };
    let received = request.mm_features.into_iter().map(data).collect();
    engine.answer(&request.request_id, 1, Some(FinishReason::Stop)).await;
    received
}

fn handle(map: &Value) -> Handle {
    let number = |key: &str| map[key].as_u64().unwrap();
    assert_eq!(number("chiasm"), 1);
    Handle {
        arena: u64::from_str_radix(map["arena"].as_str().unwrap(), 16).unwrap(),
        lease: number("lease") as u32,
        generation: number("generation") as u32,
        offset: number("offset"),
        length: number("length"),
    }
}

fn delivered(cached: usize, shm: usize, inline: usize) -> ItemDelivery {
    ItemDelivery { cached, shm, inline, no_lease: 0 }
}

async fn end(mut stream: OutputStream) -> ItemDelivery {
    let output = soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(output.new_token_ids, [TokenId(1)]);
    stream.delivered()
}

#[tokio::test]
async fn arena_is_unlinked_once_opened() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    assert!(client.arena().is_none());
    let _reader = attached(&client, &mut engine).await;
    let name = client.arena().unwrap().name().to_owned();
    assert!(name.starts_with("chiasm.") && !Path::new(SHM_DIR).join(name).exists());
}

#[tokio::test]
async fn failed_attach_leaves_no_arena() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    let mut names = Vec::new();
    let no_method = "Call to chiasm_attach method failed: \
                     'EngineCoreProc' object has no attribute 'chiasm_attach'";
    for answer in [
        Err(FailureMessage(no_method.to_owned())),
        Err(FailureMessage("Call to chiasm_attach method failed: permission denied".to_owned())),
        Ok(Value::Map(vec![("layout".into(), (LAYOUT_VERSION + 1).into())])),
        Ok(Value::Nil),
    ] {
        let answered = attach(&client, &mut engine, |name| {
            names.push(name.to_owned());
            answer.clone()
        });
        match (answered.await.unwrap_err(), answer) {
            (AttachError::NoPlugin, Err(text)) => assert_eq!(text.0, no_method),
            (AttachError::Engine(error), Err(_)) => {
                assert!(error.to_string().contains("permission denied"))
            }
            (AttachError::Layout { .. }, Ok(_)) => {}
            (error, answer) => panic!("{answer:?}: {error}"),
        }
        assert!(client.arena().is_none());
    }
    assert!(names.iter().all(|name| !Path::new(SHM_DIR).join(name).exists()));
}

#[tokio::test]
async fn items_of_one_request_are_delivered_separately() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, Some(1 << 30)).await;
    let reader = attached(&client, &mut engine).await;
    let arena = client.arena().unwrap();

    let known = vec![
        ("a", Some(in_slot(arena, 1))),
        ("b", Some(in_message(2))),
        ("c", Some(in_slot(arena, 3))),
    ];
    let stream = client.submit(request("first", known)).unwrap();
    let first = receive(&mut engine, &reader).await;
    assert!(
        matches!(first[..], [ReceivedData::View(_), ReceivedData::Bytes(_), ReceivedData::View(_)]),
        "{first:?}"
    );
    assert_eq!(
        first.iter().map(ReceivedData::first_byte).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3)]
    );
    assert_eq!(end(stream).await, delivered(0, 2, 1));

    // The engine holds all items but the third.
    let mixed = vec![
        ("c", None),
        ("a", Some(in_slot(arena, 1))),
        ("d", Some(in_slot(arena, 4))),
        ("b", None),
    ];
    let stream = client.submit(request("second", mixed)).unwrap();
    let second = receive(&mut engine, &reader).await;
    assert!(
        matches!(
            second[..],
            [ReceivedData::None, ReceivedData::None, ReceivedData::View(_), ReceivedData::None]
        ),
        "{second:?}"
    );
    assert_eq!(second[2].first_byte(), Some(4));
    assert_eq!(end(stream).await, delivered(3, 1, 0));
    // The slot of an item that the engine held already is free at once.
    assert_eq!(arena.usage().slots, 3);
}

#[tokio::test]
async fn evicted_slot_is_free() {
    let dir = SocketDir::new().unwrap();
    // The cache has room for two items.
    let (client, mut engine) = connected(&dir, Some(2 * IMAGE_BYTES as u64)).await;
    let reader = attached(&client, &mut engine).await;
    let arena = client.arena().unwrap();
    let mut held = HashMap::new();
    for (value, key) in ["a", "b", "c", "d"].into_iter().enumerate() {
        let stream =
            client.submit(request(key, vec![(key, Some(in_slot(arena, value as u8)))])).unwrap();
        let view = receive(&mut engine, &reader).await.remove(0);
        end(stream).await;
        held.insert(key, view);
    }
    assert_eq!(arena.usage().leases, 4, "the engine has returned no lease yet");
    held.remove("a");
    held.remove("b");
    assert!(!client.holds("a") && client.holds("c"));
    assert_eq!((arena.usage().leases, arena.usage().slots), (2, 2));
    drop(held);
    assert_eq!(arena.usage().slots, 0);
}

/// A slot that is sent twice, as for two continuations of a prompt without a receiver cache, has
/// two leases.
#[tokio::test]
async fn slot_sent_twice_is_free_after_both_leases() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    let reader = attached(&client, &mut engine).await;
    let arena = client.arena().unwrap();
    let item = in_slot(arena, 7);
    let streams =
        ["0", "1"].map(|id| client.submit(request(id, vec![("a", Some(item.clone()))])).unwrap());
    drop(item);
    let first = receive(&mut engine, &reader).await;
    let second = receive(&mut engine, &reader).await;
    for stream in streams {
        assert_eq!(end(stream).await, delivered(0, 1, 0));
    }
    drop(first);
    assert_eq!((arena.usage().leases, arena.usage().slots), (1, 1));
    assert_eq!(second[0].first_byte(), Some(7));
    drop(second);
    assert_eq!(arena.usage().slots, 0);
}

#[tokio::test]
async fn slot_of_other_arena_is_sent_in_message() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    let reader = attached(&client, &mut engine).await;
    let other = Arena::create(ARENA_BYTES).unwrap();
    let stream = client.submit(request("a", vec![("a", Some(in_slot(&other, 9)))])).unwrap();
    let received = receive(&mut engine, &reader).await;
    assert!(matches!(&received[0], ReceivedData::Bytes(bytes) if bytes[..] == [9; IMAGE_BYTES]));
    let expected = ItemDelivery { inline: 1, no_lease: 1, ..ItemDelivery::default() };
    assert_eq!(end(stream).await, expected);
}

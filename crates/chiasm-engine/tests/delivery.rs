//! How tensors travel: a scripted engine that reads slots as the plugin in vLLM does.

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
    AttachError, ClientOptions, Delivered, EngineClient, EngineEndpoints, OutputStream, Plugin,
    SocketDir,
};
use chiasm_transfer::{Arena, ArenaReader, Handle, LAYOUT_VERSION, SHM_DIR, SlotView};
use chiasm_types::{Dtype, Placeholder, TokenId};

const IMAGE: usize = 40_000;
const ARENA: u64 = 1 << 20;

/// A client whose engine has a receiver cache of so many bytes, if any.
async fn connected(
    dir: &SocketDir,
    receiver_cache_bytes: Option<u64>,
) -> (EngineClient, MockEngine) {
    crate::mock_engine::abort_on_panics_of_the_client();
    let options = ClientOptions { receiver_cache_bytes, ..ClientOptions::default() };
    let pending = EngineClient::bind(EngineEndpoints::local("tcp://127.0.0.1:0", dir), options)
        .await
        .unwrap();
    connect(pending, report(), Order::ReportFirst).await
}

/// Lets the engine answer `chiasm_attach` with this.
async fn attach(
    client: &EngineClient,
    engine: &mut MockEngine,
    answer: impl FnOnce(&str) -> Result<Value, FailureMessage>,
) -> Result<Plugin, AttachError> {
    let (attached, ()) = tokio::join!(client.attach_arena(ARENA, Duration::from_secs(20)), async {
        let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a call") };
        assert_eq!(call.method, "chiasm_attach");
        let result = answer(call.args[0].as_str().unwrap());
        let utility_output = Some(UtilityOutput { call_id: call.call_id, result });
        engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
    });
    attached
}

/// Attaches an arena; the engine's view of it.
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
    let told = Plugin { version: "0.1.0".to_owned(), encoder_cache_tokens: Some(1234) };
    assert_eq!(opened.await.unwrap(), told);
    reader.unwrap()
}

fn pixels(tensor: WireTensor) -> MmItem {
    MmItem(vec![("pixel_values".into(), MmField::flat(tensor, IMAGE))])
}

fn in_slot(arena: &Arena, value: u8) -> MmItem {
    let mut slot = arena.slot(IMAGE).unwrap();
    slot.fill(value);
    pixels(WireTensor::in_slot(Dtype::U8, vec![IMAGE], slot.publish()).unwrap())
}

fn in_message(value: u8) -> MmItem {
    pixels(WireTensor::new(Dtype::U8, vec![IMAGE], Bytes::from(vec![value; IMAGE])).unwrap())
}

/// A request with these items, one token each.
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

/// What the engine finds for an item.
#[derive(Debug)]
enum Found {
    Nothing,
    View(SlotView),
    Bytes(Bytes),
}

impl Found {
    fn first_byte(&self) -> Option<u8> {
        match self {
            Self::Nothing => None,
            Self::View(view) => Some(view[0]),
            Self::Bytes(bytes) => Some(bytes[0]),
        }
    }
}

async fn receive(engine: &mut MockEngine, reader: &ArenaReader) -> Vec<Found> {
    let request = engine.receive_add().await;
    let found = |feature: MmFeature| {
        let Some(item) = feature.data else { return Found::Nothing };
        match &item.get("pixel_values").unwrap().tensor().unwrap().data {
            TensorData::Bytes(bytes) => Found::Bytes(bytes.clone()),
            TensorData::OutOfBand(map) => Found::View(reader.resolve(&handle(map)).unwrap()),
            TensorData::Slot(_) => panic!("slots do not travel"),
        }
    };
    let found = request.mm_features.into_iter().map(found).collect();
    engine.answer(&request.request_id, 1, Some(FinishReason::Stop)).await;
    found
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

fn delivered(cached: usize, shm: usize, inline: usize) -> Delivered {
    Delivered { cached, shm, inline, no_lease: 0 }
}

async fn end(mut stream: OutputStream) -> Delivered {
    let output = soon(stream.next()).await.unwrap().unwrap();
    assert_eq!(output.new_token_ids, [TokenId(1)]);
    stream.delivered()
}

#[tokio::test]
async fn the_name_of_an_arena_is_gone_once_the_engine_has_opened_it() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    assert!(client.arena().is_none());
    let _reader = attached(&client, &mut engine).await;
    let name = client.arena().unwrap().name().to_owned();
    assert!(name.starts_with("chiasm.") && !Path::new(SHM_DIR).join(name).exists());
}

#[tokio::test]
async fn an_engine_that_can_not_open_an_arena_has_none() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    let mut names = Vec::new();
    let no_method = "Call to chiasm_attach method failed: 'EngineCoreProc' object has no attribute 'chiasm_attach'";
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
async fn each_item_of_a_request_travels_in_its_own_way() {
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
    assert!(matches!(first[..], [Found::View(_), Found::Bytes(_), Found::View(_)]), "{first:?}");
    assert_eq!(
        first.iter().map(Found::first_byte).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3)]
    );
    assert_eq!(end(stream).await, delivered(0, 2, 1));

    // Three of four are held; the third place is the new one.
    let mixed = vec![
        ("c", None),
        ("a", Some(in_slot(arena, 1))),
        ("d", Some(in_slot(arena, 4))),
        ("b", None),
    ];
    let stream = client.submit(request("second", mixed)).unwrap();
    let second = receive(&mut engine, &reader).await;
    assert!(
        matches!(second[..], [Found::Nothing, Found::Nothing, Found::View(_), Found::Nothing]),
        "{second:?}"
    );
    assert_eq!(second[2].first_byte(), Some(4));
    assert_eq!(end(stream).await, delivered(3, 1, 0));
    // What was written for an item that the engine held already is free at once.
    assert_eq!(arena.usage().slots, 3);
}

#[tokio::test]
async fn a_slot_is_free_when_the_engine_evicts_it() {
    let dir = SocketDir::new().unwrap();
    // Holds two.
    let (client, mut engine) = connected(&dir, Some(2 * IMAGE as u64)).await;
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
    assert_eq!(arena.usage().leases, 4, "the engine has given nothing back yet");
    held.remove("a");
    held.remove("b");
    assert!(!client.holds("a") && client.holds("c"));
    assert_eq!((arena.usage().leases, arena.usage().slots), (2, 2));
    drop(held);
    assert_eq!(arena.usage().slots, 0);
}

/// Two sendings of one slot, as for two continuations of a prompt without a receiver cache, are two
/// leases.
#[tokio::test]
async fn a_slot_that_is_sent_twice_is_free_after_both() {
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
async fn a_slot_of_another_arena_travels_in_the_message() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir, None).await;
    let reader = attached(&client, &mut engine).await;
    let other = Arena::create(ARENA).unwrap();
    let stream = client.submit(request("a", vec![("a", Some(in_slot(&other, 9)))])).unwrap();
    let found = receive(&mut engine, &reader).await;
    assert!(matches!(&found[0], Found::Bytes(bytes) if bytes[..] == [9; IMAGE]));
    assert_eq!(end(stream).await, Delivered { inline: 1, no_lease: 1, ..Delivered::default() });
}

//! Tensors in slots of an arena: views, leases, handles that are wrong, slots that are written to.

use std::os::unix::fs::FileExt;
use std::path::Path;

use chiasm_engine::wire::{
    EngineCoreRequest, FinishReason, MmData, MmItem, TensorData, Utility, Value, request,
};
use chiasm_sim_engine::{Exit, SimConfig, SimEngine};
use chiasm_transfer::{Arena, Handle, SHM_DIR};

use crate::death::failure;
use crate::frontend::{
    Answer, Frontend, digest_of_image, feature, image, image_request, soon, text_request, tokens,
};

/// Bytes of an image's pixels, and of all its tensors.
const PIXELS: usize = 320 * 1176;
const ITEM: u64 = PIXELS as u64 + 24;

/// An engine with an arena attached.
async fn attached(change: impl FnOnce(&mut SimConfig)) -> (Frontend, SimEngine, Arena) {
    let (mut frontend, engine) = Frontend::engine(change).await;
    let arena = Arena::create(16 << 20).unwrap();
    attach(&mut frontend, &arena).await.unwrap();
    (frontend, engine, arena)
}

async fn attach(frontend: &mut Frontend, arena: &Arena) -> Result<Value, String> {
    frontend.call("chiasm_attach", vec![Value::from(arena.name())]).await
}

/// What a request carries for a slot; not made by the code that frontends use.
fn map(handle: &Handle) -> Value {
    let number = |value: u64| Value::from(value);
    let fields = [
        ("chiasm", number(1)),
        ("arena", Value::from(format!("{:016x}", handle.arena))),
        ("lease", number(handle.lease.into())),
        ("generation", number(handle.generation.into())),
        ("offset", number(handle.offset)),
        ("length", number(handle.length)),
    ];
    Value::Map(fields.into_iter().map(|(name, value)| (Value::from(name), value)).collect())
}

/// Fills a slot and lends it.
fn lend(arena: &Arena, bytes: &[u8]) -> Handle {
    let mut writer = arena.slot(bytes.len()).unwrap();
    writer.copy_from_slice(bytes);
    writer.publish().lend().unwrap().handle
}

/// The image with its pixels out of band.
fn with_pixels(mut image: MmItem, handle: &Handle) -> MmItem {
    let Some(MmData::Tensor(pixels)) = &mut image.0[0].1.data else { panic!("no pixels") };
    pixels.data = TensorData::OutOfBand(map(handle));
    image
}

/// An image of 16 × 20 patches of sevens whose pixels are in a slot.
fn slotted(arena: &Arena) -> (MmItem, Handle) {
    let handle = lend(arena, &[7; PIXELS]);
    (with_pixels(image(16, 20), &handle), handle)
}

/// Asks for such an image.
async fn ask(frontend: &mut Frontend, arena: &Arena, id: &str, hash: &str) -> (Answer, Handle) {
    let (item, handle) = slotted(arena);
    (frontend.ask(&image_request(id, hash, Some(item))).await, handle)
}

/// Writes to a slot that is not ours any more.
fn overwrite(arena: &Arena, slot: &Handle) {
    let path = Path::new(SHM_DIR).join(arena.name());
    std::fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .write_all_at(&[8], slot.offset + 1000)
        .unwrap();
}

/// Waits until so many leases have not been returned.
async fn leases(arena: &Arena, count: usize) {
    soon("leases to be returned", async {
        while arena.usage().leases != count {
            // The engine runs on this thread, too.
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// A request without images, which takes the place of the one before in the input thread.
async fn another(frontend: &mut Frontend, id: &str) {
    assert_eq!(
        frontend.ask(&text_request(id, tokens(7, 40))).await.finish,
        Some(FinishReason::Stop)
    );
}

/// Sends a request that must end by an error at once, without word of a miss.
async fn is_refused(frontend: &mut Frontend, request: &EngineCoreRequest) {
    frontend.add(request).await;
    let message = loop {
        // Steps after the end of others have nothing to say.
        let message = frontend.outputs().await;
        if !message.outputs.is_empty() {
            break message;
        }
    };
    assert!(
        message.scheduler_stats.is_none() && message.finished_requests == [&request.request_id[..]],
        "{message:?}"
    );
    let [output] = &message.outputs[..] else { panic!("{message:?}") };
    assert_eq!(
        (&output.request_id, output.finish_reason),
        (&request.request_id, Some(FinishReason::Error))
    );
    assert!(
        output.mm_cache_miss_hashes.is_empty() && output.new_token_ids.is_empty(),
        "{output:?}"
    );
}

#[tokio::test]
async fn attaching_answers_who_is_there() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let arena = Arena::create(1 << 20).unwrap();
    let answer = attach(&mut frontend, &arena).await.unwrap();
    let names: Vec<_> =
        answer.as_map().unwrap().iter().map(|(name, _)| name.as_str().unwrap()).collect();
    assert_eq!(names, ["plugin", "layout", "pid", "encoder_cache_tokens"]);
    assert_eq!(
        (answer["layout"].as_u64(), answer["pid"].as_u64()),
        (Some(1), Some(std::process::id().into()))
    );
}

#[tokio::test]
async fn attaching_fails_with_a_reason() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let gone = Arena::create(1 << 20).unwrap();
    gone.unlink();
    for (args, reason) in [
        (vec![Value::from(gone.name())], "No such file"),
        (vec![Value::from("/etc/passwd")], "is not the name of an arena"),
        (vec![Value::from(7)], "must be a text"),
        (vec![], "missing 1 required positional argument: 'name'"),
        (vec![Value::Nil, Value::Nil], "Call to chiasm_attach method failed: "),
    ] {
        let error = frontend.call("chiasm_attach", args).await.unwrap_err();
        assert!(
            error.starts_with("Call to chiasm_attach method failed: ") && error.contains(reason),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_engine_without_the_plugin_does_not_know_it_and_goes_deaf_of_handles() {
    let (mut frontend, _engine) = Frontend::engine(|config| config.plugin = false).await;
    let arena = Arena::create(1 << 20).unwrap();
    let unknown = "Call to chiasm_attach method failed: 'EngineCoreProc' object has no attribute 'chiasm_attach'";
    assert_eq!(attach(&mut frontend, &arena).await, Err(unknown.to_owned()));
    let (item, _) = slotted(&arena);
    frontend.add(&image_request("1", "aa", Some(item))).await;
    frontend.disconnect().await;
}

#[tokio::test]
async fn a_slot_says_the_same_as_bytes_inline() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    arena.unlink();
    let inline = frontend.ask(&image_request("1", "aa", Some(image(16, 20)))).await;
    let (by_slot, _) = ask(&mut frontend, &arena, "2", "bb").await;
    let saw = format!("1 image 280x224 (80 tokens, {}); 0 of 109", digest_of_image(16, 20));
    assert!(by_slot.text().starts_with(&saw), "{}", by_slot.text());
    assert_eq!(by_slot.text(), inline.text());
    let mut bytes = vec![7; PIXELS];
    bytes[PIXELS - 1] = 8;
    let other = with_pixels(image(16, 20), &lend(&arena, &bytes));
    let other = frontend.ask(&image_request("3", "cc", Some(other))).await;
    assert_ne!(other.text(), inline.text());
    // The grid in a slot, too.
    let (mut item, _) = slotted(&arena);
    let grid: Vec<u8> = [1_i64, 16, 20].iter().flat_map(|side| side.to_le_bytes()).collect();
    let Some(MmData::Tensor(tensor)) = &mut item.0[1].1.data else { panic!("no grid") };
    tensor.data = TensorData::OutOfBand(map(&lend(&arena, &grid)));
    assert_eq!(frontend.ask(&image_request("4", "dd", Some(item))).await.text(), inline.text());
    let again = frontend.ask(&image_request("5", "bb", None)).await;
    assert!(again.text().starts_with(&saw.replace("; 0 of", "; 96 of")), "{}", again.text());
    assert_eq!(arena.usage().leases, 4);
    assert!(matches!(engine.stop().await, Exit::Stopped));
    leases(&arena, 0).await;
}

#[tokio::test]
async fn what_the_cache_evicts_or_replaces_is_returned() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(2 * ITEM)).await;
    for (id, hash, held) in [("1", "aa", 1), ("2", "bb", 2), ("3", "cc", 2), ("4", "cc", 2)] {
        let (answer, _) = ask(&mut frontend, &arena, id, hash).await;
        assert_eq!(answer.finish, Some(FinishReason::Stop));
        leases(&arena, held).await;
    }
    assert_eq!(arena.usage().used, 2 * (PIXELS as u64));
    assert_eq!(
        frontend.ask(&image_request("5", "bb", None)).await.finish,
        Some(FinishReason::Stop)
    );
    // Replaced by bytes.
    frontend.ask(&image_request("6", "bb", Some(image(16, 20)))).await;
    leases(&arena, 1).await;
}

#[tokio::test]
async fn the_last_request_keeps_its_slots_until_another_one_comes() {
    let (mut frontend, _engine, arena) = attached(|_| {}).await;
    for (round, other) in [("1", "2"), ("3", "4")] {
        ask(&mut frontend, &arena, round, "aa").await;
        another(&mut frontend, other).await;
        // Now only the cache has it.
        assert_eq!(arena.usage().leases, 1);
        assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
        leases(&arena, 0).await;
    }
    ask(&mut frontend, &arena, "5", "aa").await;
    for _ in 0..2 {
        assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
        assert_eq!(arena.usage().leases, 1, "the input thread still has it");
    }
    another(&mut frontend, "6").await;
    leases(&arena, 0).await;
}

#[tokio::test]
async fn a_request_that_misses_does_not_end_the_hold_of_the_one_before() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(ITEM - 1)).await;
    ask(&mut frontend, &arena, "1", "aa").await;
    let missed = frontend.ask(&image_request("2", "nobody", None)).await;
    assert_eq!(missed.outputs[0].mm_cache_miss_hashes, ["nobody"]);
    // vLLM's `req` is the new one, its `request` still the old.
    assert_eq!(arena.usage().leases, 1);
    assert_eq!(frontend.call("get_supported_tasks", vec![]).await.map(|_| ()), Ok(()));
    leases(&arena, 0).await;
}

#[tokio::test]
async fn a_running_request_keeps_its_slots() {
    let (mut frontend, _engine, arena) = attached(|config| {
        config.receiver_cache_bytes = None;
        (config.pace.speedup, config.pace.decode_tokens_per_s) = (1.0, 500.0);
        config.max_model_len = 8192;
    })
    .await;
    let mut request = image_request("long", "aa", Some(slotted(&arena).0));
    (request.sampling_params.max_tokens, request.sampling_params.eos_token_id) = (100_000, None);
    frontend.add(&request).await;
    frontend.add(&text_request("short", tokens(7, 40))).await;
    let answers = frontend.answers(1).await;
    assert_eq!((answers["short"].finish, answers["long"].finish), (Some(FinishReason::Stop), None));
    assert_eq!(arena.usage().leases, 1, "encoded long ago, but vLLM keeps it");
    frontend.abort(&["long"]).await;
    leases(&arena, 0).await;
}

#[tokio::test]
async fn a_handle_that_can_not_be_resolved_fails_its_request_alone() {
    let (mut frontend, engine) = Frontend::engine(|_| {}).await;
    let arena = Arena::create(16 << 20).unwrap();
    let good = lend(&arena, &[7; PIXELS]);
    // No arena is attached.
    is_refused(
        &mut frontend,
        &image_request("early", "aa", Some(with_pixels(image(16, 20), &good))),
    )
    .await;

    attach(&mut frontend, &arena).await.unwrap();
    let (short, used) = (lend(&arena, &[7; PIXELS - 1]), lend(&arena, &[7; PIXELS]));
    let (moved, longer) = (lend(&arena, &[7; PIXELS]), lend(&arena, &[7; PIXELS]));
    frontend.ask(&image_request("first", "used", Some(with_pixels(image(16, 20), &used)))).await;
    for (id, handle) in [
        ("arena", Handle { arena: good.arena.wrapping_add(1), ..good }),
        ("lease", Handle { lease: 1000, ..good }),
        ("generation", Handle { generation: good.generation + 1, ..good }),
        ("offset", Handle { offset: moved.offset + 4096, ..moved }),
        ("length", Handle { length: longer.length + 1, ..longer }),
        ("short", short),
        ("used", used),
    ] {
        is_refused(
            &mut frontend,
            &image_request(id, "aa", Some(with_pixels(image(16, 20), &handle))),
        )
        .await;
    }
    let mut unknown = image(16, 20);
    let Some(MmData::Tensor(pixels)) = &mut unknown.0[0].1.data else { panic!("no pixels") };
    pixels.data = TensorData::OutOfBand(Value::Map(vec![(Value::from("other"), Value::from(1))]));
    is_refused(&mut frontend, &image_request("other", "aa", Some(unknown))).await;

    // None of them has left anything behind, and the next one is fine.
    let missed = frontend.ask(&image_request("none", "aa", None)).await;
    assert_eq!(missed.outputs[0].mm_cache_miss_hashes, ["aa"]);
    let answer =
        frontend.ask(&image_request("none", "aa", Some(with_pixels(image(16, 20), &good)))).await;
    assert_eq!((answer.finish, answer.cached()), (Some(FinishReason::Stop), 0));
    leases(&arena, 2).await;
    assert!(matches!(engine.stop().await, Exit::Stopped));
}

#[tokio::test]
async fn a_refused_request_does_not_touch_the_receiver_cache_and_returns_what_did_resolve() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(2 * ITEM)).await;
    ask(&mut frontend, &arena, "1", "old").await;
    ask(&mut frontend, &arena, "2", "young").await;
    let (fine, handle) = slotted(&arena);
    let wrong = with_pixels(image(16, 20), &Handle { lease: 1000, ..handle });
    let mut request = image_request("3", "old", None);
    request
        .mm_features
        .extend([feature("fine", Some(fine), 101, 1), feature("wrong", Some(wrong), 103, 1)]);
    is_refused(&mut frontend, &request).await;
    leases(&arena, 2).await;
    // "old" is still the oldest.
    ask(&mut frontend, &arena, "4", "new").await;
    for (id, hash, finish) in [
        ("5", "young", FinishReason::Stop),
        ("6", "new", FinishReason::Stop),
        ("7", "old", FinishReason::Error),
    ] {
        assert_eq!(
            frontend.ask(&image_request(id, hash, None)).await.finish,
            Some(finish),
            "{hash}"
        );
    }
}

#[tokio::test]
async fn another_arena_takes_over_and_views_of_the_first_stay() {
    let (mut frontend, _engine, first) = attached(|_| {}).await;
    ask(&mut frontend, &first, "1", "aa").await;
    let second = Arena::create(16 << 20).unwrap();
    attach(&mut frontend, &second).await.unwrap();
    is_refused(&mut frontend, &image_request("late", "bb", Some(slotted(&first).0))).await;
    let (answer, _) = ask(&mut frontend, &second, "2", "bb").await;
    assert_eq!(answer.finish, Some(FinishReason::Stop));
    assert_eq!(
        frontend.ask(&image_request("3", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    assert_eq!(second.usage().leases, 1);
}

/// Whether the engine dies of a slot that was written to.
async fn dies_of(frontend: &mut Frontend, engine: &SimEngine, slot: &Handle) {
    frontend.death().await;
    let reason = format!("slot {} was written to while it was lent", slot.offset);
    let error = failure(engine).await;
    assert!(error.to_string().contains(&reason), "{error}");
}

#[tokio::test]
async fn a_slot_that_was_written_to_is_noticed_when_its_item_is_used_again() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = ask(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    frontend.add(&image_request("2", "aa", None)).await;
    dies_of(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn a_slot_that_was_written_to_is_noticed_when_it_is_let_go() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = ask(&mut frontend, &arena, "1", "aa").await;
    another(&mut frontend, "2").await;
    overwrite(&arena, &slot);
    // It is idle after this: the death does not wait for a next request.
    let reset =
        Utility { client_index: 0, call_id: 9, method: "reset_mm_cache".into(), args: vec![] };
    frontend.send(request::encode_utility(&reset)).await;
    dies_of(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn a_slot_that_was_written_to_is_noticed_at_the_end() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = ask(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    assert!(matches!(engine.stop().await, Exit::Failed(_)));
    dies_of(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn told_not_to_look_it_does_not_notice() {
    let (mut frontend, engine, arena) = attached(|config| config.verify_slots = false).await;
    let (first, slot) = ask(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    let again = frontend
        .ask(&EngineCoreRequest { cache_salt: Some("x".into()), ..image_request("2", "aa", None) })
        .await;
    assert_eq!(again.text(), first.text());
    assert!(matches!(engine.stop().await, Exit::Stopped));
}

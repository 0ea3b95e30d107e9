//! Tensors in slots of an arena: views, leases, invalid handles, overwritten slots.

use std::os::unix::fs::FileExt;
use std::path::Path;

use chiasm_engine::wire::{
    EngineCoreRequest, FinishReason, MmData, MmItem, TensorData, Utility, Value, request,
};
use chiasm_sim_engine::{Exit, SimConfig, SimEngine};
use chiasm_transfer::{Arena, Handle, SHM_DIR};

use crate::death::failure;
use crate::frontend::{
    Answer, Frontend, feature, image, image_digest, image_request, soon, text_request, tokens,
};

/// The number of bytes of an image's pixels.
const PIXEL_BYTES: usize = 320 * 1176;
/// The number of bytes of an image's tensors.
const ITEM_BYTES: u64 = PIXEL_BYTES as u64 + 24;

/// Starts an engine with an attached arena.
async fn attached(change: impl FnOnce(&mut SimConfig)) -> (Frontend, SimEngine, Arena) {
    let (mut frontend, engine) = Frontend::engine(change).await;
    let arena = Arena::create(16 << 20).unwrap();
    attach(&mut frontend, &arena).await.unwrap();
    (frontend, engine, arena)
}

async fn attach(frontend: &mut Frontend, arena: &Arena) -> Result<Value, String> {
    frontend.call("chiasm_attach", vec![Value::from(arena.name())]).await
}

/// Returns the map of a handle in a request, built independently of the frontend's code.
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

/// Returns the image with its pixels out of band.
fn with_pixels(mut image: MmItem, handle: &Handle) -> MmItem {
    let Some(MmData::Tensor(pixels)) = &mut image.0[0].1.data else { panic!("no pixels") };
    pixels.data = TensorData::OutOfBand(map(handle));
    image
}

/// Returns an image of 16 × 20 patches of sevens whose pixels are in a slot.
fn image_in_slot(arena: &Arena) -> (MmItem, Handle) {
    let handle = lend(arena, &[7; PIXEL_BYTES]);
    (with_pixels(image(16, 20), &handle), handle)
}

/// Runs a request with the image of [`image_in_slot`].
async fn run(frontend: &mut Frontend, arena: &Arena, id: &str, hash: &str) -> (Answer, Handle) {
    let (item, handle) = image_in_slot(arena);
    (frontend.run(&image_request(id, hash, Some(item))).await, handle)
}

/// Overwrites a byte of a lent slot.
fn overwrite(arena: &Arena, slot: &Handle) {
    let path = Path::new(SHM_DIR).join(arena.name());
    std::fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .write_all_at(&[8], slot.offset + 1000)
        .unwrap();
}

/// Waits until the arena has `count` leases.
async fn wait_for_leases(arena: &Arena, count: usize) {
    soon("leases to be returned", async {
        while arena.usage().leases != count {
            // The engine runs on this thread, too.
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Runs a request without images, which replaces the previous request in the engine's input thread.
async fn run_text(frontend: &mut Frontend, id: &str) {
    assert_eq!(
        frontend.run(&text_request(id, tokens(7, 40))).await.finish,
        Some(FinishReason::Stop)
    );
}

/// Sends a request that must fail at once, without a reported cache miss.
async fn expect_refusal(frontend: &mut Frontend, request: &EngineCoreRequest) {
    frontend.add(request).await;
    let message = loop {
        // Steps after the end of other requests have no outputs.
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
async fn attaching_returns_the_plugins_description() {
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
        (vec![Value::from(7)], "must be a string"),
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
async fn handle_without_the_plugin_ends_the_connection() {
    let (mut frontend, _engine) = Frontend::engine(|config| config.plugin = false).await;
    let arena = Arena::create(1 << 20).unwrap();
    let unknown = "Call to chiasm_attach method failed: \
                   'EngineCoreProc' object has no attribute 'chiasm_attach'";
    assert_eq!(attach(&mut frontend, &arena).await, Err(unknown.to_owned()));
    let (item, _) = image_in_slot(&arena);
    frontend.add(&image_request("1", "aa", Some(item))).await;
    frontend.wait_for_disconnect().await;
}

#[tokio::test]
async fn slot_gives_the_same_answer_as_inline_bytes() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    arena.unlink();
    let inline = frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    let (by_slot, _) = run(&mut frontend, &arena, "2", "bb").await;
    let observed = format!("1 image 280x224 (80 tokens, {}); 0 of 109", image_digest(16, 20));
    assert!(by_slot.text().starts_with(&observed), "{}", by_slot.text());
    assert_eq!(by_slot.text(), inline.text());
    let mut bytes = vec![7; PIXEL_BYTES];
    bytes[PIXEL_BYTES - 1] = 8;
    let other = with_pixels(image(16, 20), &lend(&arena, &bytes));
    let other = frontend.run(&image_request("3", "cc", Some(other))).await;
    assert_ne!(other.text(), inline.text());
    // Both tensors, pixels and grid, are in slots.
    let (mut item, _) = image_in_slot(&arena);
    let grid: Vec<u8> = [1_i64, 16, 20].iter().flat_map(|side| side.to_le_bytes()).collect();
    let Some(MmData::Tensor(tensor)) = &mut item.0[1].1.data else { panic!("no grid") };
    tensor.data = TensorData::OutOfBand(map(&lend(&arena, &grid)));
    assert_eq!(frontend.run(&image_request("4", "dd", Some(item))).await.text(), inline.text());
    let again = frontend.run(&image_request("5", "bb", None)).await;
    let observed_again = observed.replace("; 0 of", "; 96 of");
    assert!(again.text().starts_with(&observed_again), "{}", again.text());
    assert_eq!(arena.usage().leases, 4);
    assert!(matches!(engine.stop().await, Exit::Stopped));
    wait_for_leases(&arena, 0).await;
}

#[tokio::test]
async fn evicted_or_replaced_slots_are_returned() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(2 * ITEM_BYTES)).await;
    for (id, hash, held) in [("1", "aa", 1), ("2", "bb", 2), ("3", "cc", 2), ("4", "cc", 2)] {
        let (answer, _) = run(&mut frontend, &arena, id, hash).await;
        assert_eq!(answer.finish, Some(FinishReason::Stop));
        wait_for_leases(&arena, held).await;
    }
    assert_eq!(arena.usage().used, 2 * (PIXEL_BYTES as u64));
    assert_eq!(
        frontend.run(&image_request("5", "bb", None)).await.finish,
        Some(FinishReason::Stop)
    );
    // The slot is replaced by inline bytes.
    frontend.run(&image_request("6", "bb", Some(image(16, 20)))).await;
    wait_for_leases(&arena, 1).await;
}

#[tokio::test]
async fn input_thread_keeps_slots_until_another_request() {
    let (mut frontend, _engine, arena) = attached(|_| {}).await;
    for (round, other) in [("1", "2"), ("3", "4")] {
        run(&mut frontend, &arena, round, "aa").await;
        run_text(&mut frontend, other).await;
        // Only the cache still holds the slot.
        assert_eq!(arena.usage().leases, 1);
        assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
        wait_for_leases(&arena, 0).await;
    }
    run(&mut frontend, &arena, "5", "aa").await;
    for _ in 0..2 {
        assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
        assert_eq!(arena.usage().leases, 1, "the input thread still holds the slot");
    }
    run_text(&mut frontend, "6").await;
    wait_for_leases(&arena, 0).await;
}

#[tokio::test]
async fn cache_miss_keeps_the_slots_of_the_last_request() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(ITEM_BYTES - 1)).await;
    run(&mut frontend, &arena, "1", "aa").await;
    let missed = frontend.run(&image_request("2", "unknown", None)).await;
    assert_eq!(missed.outputs[0].mm_cache_miss_hashes, ["unknown"]);
    // In vLLM's input thread, `req` is the new request, but `request` is still the old one.
    assert_eq!(arena.usage().leases, 1);
    assert_eq!(frontend.call("get_supported_tasks", vec![]).await.map(|_| ()), Ok(()));
    wait_for_leases(&arena, 0).await;
}

#[tokio::test]
async fn running_request_keeps_its_slots() {
    let (mut frontend, _engine, arena) = attached(|config| {
        config.receiver_cache_bytes = None;
        config.pace.speedup = 1.0;
        config.pace.decode_tokens_per_s = 500.0;
        config.max_model_len = 8192;
    })
    .await;
    let mut request = image_request("long", "aa", Some(image_in_slot(&arena).0));
    request.sampling_params.max_tokens = 100_000;
    request.sampling_params.eos_token_id = None;
    frontend.add(&request).await;
    frontend.add(&text_request("short", tokens(7, 40))).await;
    let answers = frontend.answers(1).await;
    assert_eq!((answers["short"].finish, answers["long"].finish), (Some(FinishReason::Stop), None));
    assert_eq!(arena.usage().leases, 1, "the image was encoded, but vLLM keeps the slot");
    frontend.abort(&["long"]).await;
    wait_for_leases(&arena, 0).await;
}

#[tokio::test]
async fn unresolvable_handle_fails_only_its_request() {
    let (mut frontend, engine) = Frontend::engine(|_| {}).await;
    let arena = Arena::create(16 << 20).unwrap();
    let good = lend(&arena, &[7; PIXEL_BYTES]);
    // No arena is attached.
    expect_refusal(
        &mut frontend,
        &image_request("early", "aa", Some(with_pixels(image(16, 20), &good))),
    )
    .await;

    attach(&mut frontend, &arena).await.unwrap();
    let short = lend(&arena, &[7; PIXEL_BYTES - 1]);
    let used = lend(&arena, &[7; PIXEL_BYTES]);
    let moved = lend(&arena, &[7; PIXEL_BYTES]);
    let longer = lend(&arena, &[7; PIXEL_BYTES]);
    frontend.run(&image_request("first", "used", Some(with_pixels(image(16, 20), &used)))).await;
    for (id, handle) in [
        ("arena", Handle { arena: good.arena.wrapping_add(1), ..good }),
        ("lease", Handle { lease: 1000, ..good }),
        ("generation", Handle { generation: good.generation + 1, ..good }),
        ("offset", Handle { offset: moved.offset + 4096, ..moved }),
        ("length", Handle { length: longer.length + 1, ..longer }),
        ("short", short),
        ("used", used),
    ] {
        expect_refusal(
            &mut frontend,
            &image_request(id, "aa", Some(with_pixels(image(16, 20), &handle))),
        )
        .await;
    }
    let mut unknown = image(16, 20);
    let Some(MmData::Tensor(pixels)) = &mut unknown.0[0].1.data else { panic!("no pixels") };
    pixels.data = TensorData::OutOfBand(Value::Map(vec![(Value::from("other"), Value::from(1))]));
    expect_refusal(&mut frontend, &image_request("other", "aa", Some(unknown))).await;

    // The refused requests have left nothing behind, and the next one succeeds.
    let missed = frontend.run(&image_request("none", "aa", None)).await;
    assert_eq!(missed.outputs[0].mm_cache_miss_hashes, ["aa"]);
    let answer =
        frontend.run(&image_request("none", "aa", Some(with_pixels(image(16, 20), &good)))).await;
    assert_eq!((answer.finish, answer.cached()), (Some(FinishReason::Stop), 0));
    wait_for_leases(&arena, 2).await;
    assert!(matches!(engine.stop().await, Exit::Stopped));
}

#[tokio::test]
async fn refused_request_does_not_change_the_receiver_cache() {
    let (mut frontend, _engine, arena) =
        attached(|config| config.receiver_cache_bytes = Some(2 * ITEM_BYTES)).await;
    run(&mut frontend, &arena, "1", "old").await;
    run(&mut frontend, &arena, "2", "young").await;
    let (fine, handle) = image_in_slot(&arena);
    let wrong = with_pixels(image(16, 20), &Handle { lease: 1000, ..handle });
    let mut request = image_request("3", "old", None);
    request
        .mm_features
        .extend([feature("fine", Some(fine), 101, 1), feature("wrong", Some(wrong), 103, 1)]);
    expect_refusal(&mut frontend, &request).await;
    wait_for_leases(&arena, 2).await;
    // "old" is still the oldest item.
    run(&mut frontend, &arena, "4", "new").await;
    for (id, hash, finish) in [
        ("5", "young", FinishReason::Stop),
        ("6", "new", FinishReason::Stop),
        ("7", "old", FinishReason::Error),
    ] {
        assert_eq!(
            frontend.run(&image_request(id, hash, None)).await.finish,
            Some(finish),
            "{hash}"
        );
    }
}

#[tokio::test]
async fn views_survive_another_arena() {
    let (mut frontend, _engine, first) = attached(|_| {}).await;
    run(&mut frontend, &first, "1", "aa").await;
    let second = Arena::create(16 << 20).unwrap();
    attach(&mut frontend, &second).await.unwrap();
    expect_refusal(&mut frontend, &image_request("late", "bb", Some(image_in_slot(&first).0)))
        .await;
    let (answer, _) = run(&mut frontend, &second, "2", "bb").await;
    assert_eq!(answer.finish, Some(FinishReason::Stop));
    assert_eq!(
        frontend.run(&image_request("3", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    assert_eq!(second.usage().leases, 1);
}

/// Waits until the engine dies, and checks that an overwritten slot is the reason.
async fn expect_death(frontend: &mut Frontend, engine: &SimEngine, slot: &Handle) {
    frontend.death().await;
    let reason = format!("slot {} was written to while it was lent", slot.offset);
    let error = failure(engine).await;
    assert!(error.to_string().contains(&reason), "{error}");
}

#[tokio::test]
async fn overwritten_slot_kills_engine_on_next_use() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = run(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    frontend.add(&image_request("2", "aa", None)).await;
    expect_death(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn overwritten_slot_kills_engine_on_return() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = run(&mut frontend, &arena, "1", "aa").await;
    run_text(&mut frontend, "2").await;
    overwrite(&arena, &slot);
    // The engine dies of this call alone: no further request is sent.
    let reset =
        Utility { client_index: 0, call_id: 9, method: "reset_mm_cache".into(), args: vec![] };
    frontend.send(request::encode_utility(&reset)).await;
    expect_death(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn overwritten_slot_is_found_on_engine_stop() {
    let (mut frontend, engine, arena) = attached(|_| {}).await;
    let (_, slot) = run(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    assert!(matches!(engine.stop().await, Exit::Failed(_)));
    expect_death(&mut frontend, &engine, &slot).await;
}

#[tokio::test]
async fn overwritten_slot_is_ignored_without_verification() {
    let (mut frontend, engine, arena) = attached(|config| config.verify_slots = false).await;
    let (first, slot) = run(&mut frontend, &arena, "1", "aa").await;
    overwrite(&arena, &slot);
    let again = frontend
        .run(&EngineCoreRequest { cache_salt: Some("x".into()), ..image_request("2", "aa", None) })
        .await;
    assert_eq!(again.text(), first.text());
    assert!(matches!(engine.stop().await, Exit::Stopped));
}

use super::*;
use crate::embeddings::EmbeddingFolder;
use crate::image::tests::item;
use crate::item::tests::{by_slot, inline};
use crate::pace::Pace;
use chiasm_engine::wire::{EngineCoreRequest, MmFeature, SamplingParams};
use chiasm_types::{BlockSize, Placeholder, TokenId};

fn config() -> SimConfig {
    SimConfig {
        block_size: BlockSize::new(4).unwrap(),
        num_blocks: 33,
        max_model_len: 128,
        pace: Pace::instant(),
        ..SimConfig::new("tcp://127.0.0.1:1")
    }
}

fn scheduler(change: impl FnOnce(&mut SimConfig)) -> Scheduler {
    let mut config = config();
    change(&mut config);
    Scheduler::new(Arc::new(config), None)
}

fn request(id: &str, prompt: u32, length: u32, max_tokens: u32) -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: id.into(),
        prompt_token_ids: (0..length)
            .map(|at| TokenId(prompt * 1000 + at))
            .collect::<Vec<_>>()
            .into(),
        sampling_params: SamplingParams { max_tokens, ..SamplingParams::default() },
        ..EngineCoreRequest::default()
    }
}

fn with_image(
    mut request: EngineCoreRequest,
    identifier: &str,
    offset: usize,
) -> EngineCoreRequest {
    request.mm_features.push(MmFeature {
        // 4 × 4 patches: 4 embeddings
        data: Some(item(4, 4)),
        modality: "image".into(),
        identifier: identifier.into(),
        position: Placeholder { offset, length: 4, is_embed: None },
        mm_hash: None,
    });
    request
}

impl Scheduler {
    fn start(&mut self, request: EngineCoreRequest) {
        self.try_start(request).unwrap();
    }

    fn try_start(&mut self, request: EngineCoreRequest) -> Result<(), Fatal> {
        let features = request.mm_features.iter();
        let items = features.map(|feature| feature.data.clone().map(inline)).collect();
        self.add(Sequence::new(request, items, self.executor.config.block_size.get()), 1.0)
    }

    /// Takes one step and returns its work and its outputs.
    fn step(&mut self) -> (StepWork, Vec<EngineCoreOutput>) {
        let work = self.schedule(1.0).unwrap();
        let outputs =
            self.update(1.0).into_iter().flat_map(|(_, message)| message.outputs).collect();
        (work, outputs)
    }

    fn running(&self) -> Vec<&str> {
        self.batch.running().iter().map(|running| &running.request.id[..]).collect()
    }
}

fn ids(outputs: &[EngineCoreOutput]) -> Vec<&str> {
    outputs.iter().map(|output| &output.request_id[..]).collect()
}

fn cached(output: &EngineCoreOutput) -> u64 {
    output.prefill_stats.as_ref().unwrap().num_cached_tokens
}

#[test]
fn stored_embeddings_are_not_computed_again() {
    let folder = tempfile::tempdir().unwrap();
    let embeddings =
        |encode_only| EmbeddingFolder { folder: folder.path().to_owned(), encode_only };
    let mut computes = scheduler(|config| config.embeddings = Some(embeddings(false)));
    computes.start(with_image(request("a", 1, 8, 1), "one", 0));
    assert_eq!(computes.step().0.images, 1, "the store has no embeddings of the image");
    let mut encodes = scheduler(|config| config.embeddings = Some(embeddings(true)));
    encodes.start(with_image(request("b", 2, 4, 1), "other", 0));
    let (work, outputs) = encodes.step();
    let params = outputs[0].ec_transfer_params.as_ref().unwrap();
    assert_eq!((work.images, outputs[0].finish_reason), (1, Some(FinishReason::Stop)));
    assert!(outputs[0].new_token_ids.is_empty() && params["other"]["bytes"].as_u64() > Some(0));
    computes.start(with_image(request("c", 3, 8, 1), "other", 0));
    assert_eq!(computes.step().0.images, 0, "the embeddings are stored");
    // The third item's file in the store has embeddings of another item.
    std::fs::write(folder.path().join("third.safetensors"), "4 embeddings of other").unwrap();
    computes.start(with_image(request("d", 4, 8, 1), "third", 0));
    assert!(computes.schedule(1.0).is_err());
}

#[test]
fn prefill_shares_steps_with_decode() {
    let mut scheduler = scheduler(|_| {});
    scheduler.start(request("a", 1, 10, 3));
    assert_eq!(scheduler.step().0, StepWork { prefill_tokens: 10, ..StepWork::default() });
    scheduler.start(request("b", 2, 6, 3));
    let (work, outputs) = scheduler.step();
    assert_eq!(work, StepWork { prefill_tokens: 6, decodes: 1, images: 0 });
    assert_eq!(ids(&outputs), ["a", "b"]);
}

#[test]
fn long_prompt_is_computed_in_chunks() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = 8);
    scheduler.start(request("a", 1, 20, 3));
    for (tokens, outputs) in [(8, 0), (8, 0), (4, 1)] {
        let (work, found) = scheduler.step();
        assert_eq!((work.prefill_tokens, found.len()), (tokens, outputs));
    }
    // Each chunk stores the blocks that it fills.
    assert_eq!(scheduler.take_kv_events().len(), 3);
}

#[test]
fn requests_of_one_step_share_blocks() {
    let mut scheduler = scheduler(|_| {});
    scheduler.start(request("a", 1, 10, 3));
    scheduler.start(request("b", 1, 10, 3));
    let (work, outputs) = scheduler.step();
    assert_eq!(outputs.iter().map(cached).collect::<Vec<_>>(), [0, 8]);
    assert_eq!(work.prefill_tokens, 10 + 2);
}

#[test]
fn image_is_encoded_unless_cached() {
    let mut scheduler = scheduler(|_| {});
    let images = |scheduler: &mut Scheduler| scheduler.step().0.images;
    scheduler.start(with_image(request("a", 1, 11, 1), "x", 0));
    assert_eq!(images(&mut scheduler), 1);
    // The same image in another prompt: only its embeddings are cached.
    scheduler.start(with_image(request("b", 2, 11, 1), "x", 5));
    assert_eq!(images(&mut scheduler), 0);
    scheduler.reset_encoder_cache();
    // The image touches the second and the third block. The third block of b was not full, so it is
    // not in the prefix cache.
    scheduler.start(with_image(request("c", 2, 15, 1), "x", 5));
    assert_eq!(images(&mut scheduler), 1);
    scheduler.reset_encoder_cache();
    // Now both blocks are in the prefix cache.
    scheduler.start(with_image(request("d", 2, 15, 1), "x", 5));
    assert_eq!(images(&mut scheduler), 0);
}

#[test]
fn running_requests_are_limited() {
    let mut scheduler = scheduler(|config| config.max_num_seqs = 2);
    for id in ["a", "b", "c"] {
        scheduler.start(request(id, id.bytes().map(u32::from).sum(), 6, 2));
    }
    assert_eq!(ids(&scheduler.step().1), ["a", "b"]);
    assert_eq!(scheduler.running(), ["a", "b"]);
    assert_eq!(ids(&scheduler.step().1), ["a", "b"]);
    assert_eq!(ids(&scheduler.step().1), ["c"]);
}

#[test]
fn prompt_waits_until_it_fits_completely() {
    // 32 blocks of 4 tokens
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = 16);
    scheduler.start(request("a", 1, 70, 60));
    while scheduler.step().1.is_empty() {}
    scheduler.start(request("b", 2, 70, 1));
    let (_, outputs) = scheduler.step();
    assert_eq!(ids(&outputs), ["a"]);
    assert_eq!(scheduler.batch.waiting(), 1);
    scheduler.abort(&["a".to_owned()]);
    scheduler.step();
    assert_eq!(scheduler.running(), ["b"]);
}

#[test]
fn last_request_is_preempted_but_resumes() {
    let mut scheduler = scheduler(|_| {});
    scheduler.start(request("a", 1, 60, 40));
    scheduler.start(request("b", 2, 60, 40));
    let mut tokens = std::collections::HashMap::<String, usize>::new();
    let mut preemptions = 0;
    while scheduler.has_unfinished() {
        for output in scheduler.step().1 {
            *tokens.entry(output.request_id.clone()).or_default() += output.new_token_ids.len();
            if output.events.iter().any(|event| event.kind == EventKind::Preempted as u32) {
                preemptions += 1;
                assert_eq!(output.request_id, "b");
                assert_eq!(output.prefill_stats, None, "only the first prefill is reported");
            }
        }
    }
    assert_eq!((tokens["a"], tokens["b"], preemptions), (40, 40, 1));
    assert_eq!(scheduler.batch.cache().usage(), 0.0);
}

#[test]
fn ended_request_causes_one_more_step() {
    let mut scheduler = scheduler(|_| {});
    scheduler.start(request("a", 1, 6, 1));
    scheduler.step();
    assert!(scheduler.has_work() && !scheduler.has_unfinished());
    assert_eq!(scheduler.schedule(1.0), Ok(StepWork::default()));
    let messages = scheduler.update(1.0);
    assert_eq!(messages.len(), 1);
    assert!(messages[0].1.outputs.is_empty() && messages[0].1.scheduler_stats.is_some());
    assert!(!scheduler.has_work());
}

#[test]
fn each_client_gets_a_message_but_only_one_has_stats() {
    let mut scheduler = scheduler(|_| {});
    for (id, client) in [("a", 1), ("b", 0), ("c", 1)] {
        scheduler.start(EngineCoreRequest { client_index: client, ..request(id, client, 6, 3) });
    }
    scheduler.schedule(1.0).unwrap();
    let messages = scheduler.update(1.0);
    let summary: Vec<_> = messages
        .iter()
        .map(|(client, message)| {
            (*client, ids(&message.outputs), message.scheduler_stats.is_some())
        })
        .collect();
    assert_eq!(summary, [(1, vec!["a", "c"], true), (0, vec!["b"], false)]);
}

#[test]
fn lookups_are_counted_once_per_admission() {
    let mut scheduler = scheduler(|_| {});
    let stats = |scheduler: &mut Scheduler| {
        scheduler.schedule(1.0).unwrap();
        let stats = scheduler.update(1.0).remove(0).1.scheduler_stats.unwrap().prefix_cache_stats;
        (stats.requests, stats.queries, stats.hits)
    };
    scheduler.start(request("a", 1, 10, 3));
    assert_eq!(stats(&mut scheduler), (1, 10, 0));
    scheduler.start(request("b", 1, 10, 3));
    assert_eq!(stats(&mut scheduler), (1, 10, 8));
    assert_eq!(stats(&mut scheduler), (0, 0, 0));
}

#[test]
fn duplicate_id_or_too_long_prompt_is_fatal() {
    let mut scheduler = scheduler(|_| {});
    scheduler.start(request("a", 1, 10, 3));
    assert!(scheduler.try_start(request("a", 1, 10, 3)).is_err());
    scheduler.start(request("b", 1, 129, 3));
    assert!(scheduler.schedule(1.0).is_err());
}

#[test]
fn slots_are_held_until_the_step_after_the_end() {
    let mut scheduler = scheduler(|_| {});
    let (image, lent) = by_slot(item(4, 4));
    let request = with_image(request("a", 1, 11, 2), "x", 0);
    scheduler.add(Sequence::new(request, vec![Some(image)], 4), 1.0).unwrap();
    let arenas: Vec<_> = lent.into_iter().map(|lent| lent.arena).collect();
    let leases = || arenas.iter().map(|arena| arena.usage().leases).sum::<usize>();
    for (step, held) in [(1, 2), (2, 2), (3, 0)] {
        scheduler.step();
        assert_eq!(leases(), held, "after step {step}");
    }
}

#[test]
fn request_with_overwritten_slot_is_not_admitted() {
    let mut scheduler = scheduler(|_| {});
    let (image, lent) = by_slot(item(4, 4));
    let add = |scheduler: &mut Scheduler, id: &str| {
        let request = with_image(request(id, 1, 11, 1), "x", 0);
        scheduler.add(Sequence::new(request, vec![Some(image.clone())], 4), 1.0).unwrap();
    };
    add(&mut scheduler, "a");
    assert_eq!(scheduler.step().0.images, 1);
    lent[0].overwrite();
    // Nothing has to be encoded, because the embeddings are still cached.
    add(&mut scheduler, "b");
    let Err(Fatal(reason)) = scheduler.schedule(1.0) else { panic!("the request was admitted") };
    assert!(reason.ends_with("was written to while it was lent"), "{reason}");
}

#[test]
fn image_is_not_encoded_from_an_overwritten_slot() {
    let mut scheduler = scheduler(|config| config.max_num_batched_tokens = 4);
    let (image, lent) = by_slot(item(4, 4));
    let request = with_image(request("a", 1, 11, 1), "x", 5);
    scheduler.add(Sequence::new(request, vec![Some(image)], 4), 1.0).unwrap();
    assert_eq!(scheduler.step().0, StepWork { prefill_tokens: 4, ..StepWork::default() });
    // The first step admitted the request. The next step encodes the image.
    lent[0].overwrite();
    let Err(Fatal(reason)) = scheduler.schedule(1.0) else { panic!("the image was encoded") };
    assert!(reason.ends_with("was written to while it was lent"), "{reason}");
}

//! Images in events, whose names have to be learned.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::PredictedPrompt;
use chiasm_kv::event::{ExternalHash, ExtraKey, KvEvent};
use chiasm_kv::{MediaSpan, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, Placeholder, TokenId, WorkerId};
use serde_json::{Value, json};

use super::events::Translation;
use super::recent_prompts::{InFlight, RecentPrompts};

const SIZE: BlockSize = BlockSize::new(4).unwrap();
const WORKER: WorkerId = WorkerId(0);
/// The token of an image in our prompts.
const IMAGE: u32 = 99;
/// The first number that is not a token.
const VOCABULARY: u32 = 100;

const A: MmHash = MmHash::new([0xa; 32]);
const B: MmHash = MmHash::new([0xb; 32]);

/// A part of a prompt: text, or an image and its number of tokens.
#[derive(Clone, Copy)]
enum Part {
    Text(&'static [u32]),
    Image(MmHash, usize),
}
use Part::{Image, Text};

fn predicted(parts: &[Part]) -> PredictedPrompt {
    let mut tokens = Vec::new();
    let mut items = Vec::new();
    for part in parts {
        match *part {
            Text(text) => tokens.extend(text.iter().copied().map(TokenId)),
            Image(hash, length) => {
                items.push((hash, Placeholder { offset: tokens.len(), length, is_embed: None }));
                tokens.extend(vec![TokenId(IMAGE); length]);
            }
        }
    }
    PredictedPrompt { tokens: Arc::new(tokens), items }
}

/// A server, and the frontend's knowledge of its cache.
struct Server {
    recent: Arc<RecentPrompts>,
    translation: Translation,
    index: PrefixIndex,
    next: u64,
    now: Instant,
    pending: Vec<Value>,
}

impl Server {
    fn new() -> Self {
        let index = PrefixIndex::new();
        index.add_worker(WORKER, SIZE);
        let recent = Arc::new(RecentPrompts::new(SIZE));
        let translation = Translation::new(recent.clone());
        Self { recent, translation, index, next: 0, now: Instant::now(), pending: Vec::new() }
    }

    fn send(&self, parts: &[Part]) -> InFlight {
        self.recent.begin(predicted(parts))
    }

    fn emit(&mut self, data: &Value) {
        self.pending.push(json!({"event_id": self.next, "data": data, "window_size": 4096}));
        self.next += 1;
    }

    /// Emits the stored blocks of a prompt after the first `skipped` ones, with hashes from `from`
    /// on. The server's names of the images are `names`.
    fn store(&mut self, from: u64, skipped: usize, parts: &[Part], names: &[&str]) {
        let blocks = blocks(from, parts, names);
        let parent = (skipped > 0).then(|| from + skipped as u64 - 1);
        self.emit(&stored(parent, &blocks[skipped..]));
    }

    fn remove(&mut self, hash: u64) {
        self.emit(&json!({"type": "removed", "block_hashes": [hash]}));
    }

    /// Fetches the pending events and returns their translation.
    fn fetch(&mut self) -> Vec<KvEvent> {
        let answer = Value::from(std::mem::take(&mut self.pending)).to_string();
        let translated = self.translation.translate(answer.as_bytes(), self.now).unwrap();
        if translated.is_void {
            self.index.clear(WORKER);
        }
        let batch = translated.batch;
        batch.iter().for_each(|batch| drop(self.index.apply(WORKER, batch)));
        batch.map_or_else(Vec::new, |batch| batch.events)
    }

    /// Returns the number of leading blocks of a prompt that the index has for the server.
    fn overlap(&self, parts: &[Part]) -> usize {
        let PredictedPrompt { tokens, items } = predicted(parts);
        let span = |(hash, place): &(MmHash, Placeholder)| MediaSpan {
            hash: *hash,
            offset: place.offset,
            length: place.length,
        };
        let media: Vec<_> = items.iter().map(span).collect();
        let keys = block_keys(
            &PromptBlocks { tokens: &tokens, media: &media, lora: None, salt: None },
            SIZE,
        );
        self.index
            .overlaps(&keys)
            .iter()
            .find(|(worker, _)| *worker == WORKER)
            .map_or(0, |(_, blocks)| *blocks)
    }
}

/// The event data of blocks that were stored after `parent`.
fn stored(parent: Option<u64>, blocks: &[Value]) -> Value {
    json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
}

/// Returns the blocks of a prompt as a server reports them: with numbers that are not tokens in
/// place of its images.
fn blocks(from: u64, parts: &[Part], names: &[&str]) -> Vec<Value> {
    let PredictedPrompt { tokens, items } = predicted(parts);
    let blocks = tokens.chunks(SIZE.get()).enumerate().map(|(at, chunk)| {
        let begin = at * SIZE.get();
        let id = |(at, token): (usize, &TokenId)| {
            let in_image = items
                .iter()
                .any(|(_, place)| (place.offset..place.offset + place.length).contains(&at));
            let id = if in_image { VOCABULARY + 1 } else { token.0 };
            json!({"type": "unique_token", "token_id": id, "token_extra_id": 0})
        };
        let ids: Vec<Value> = (begin..).zip(chunk).map(id).collect();
        let key = |(name, (_, place)): (&&str, &(MmHash, Placeholder))| {
            let touches = place.offset < begin + chunk.len() && place.offset + place.length > begin;
            let offset = begin.saturating_sub(place.offset);
            touches.then(|| json!({"type": "mm_key", "hash": name, "start_offset": offset}))
        };
        let keys: Vec<Value> = names.iter().zip(&items).filter_map(key).collect();
        json!({
            "type": "stored_block", "block_hash": from + at as u64, "tokens": ids,
            "cache_level": 0, "priority": 35, "mm_keys": keys, "cache_salt": null,
        })
    });
    blocks.collect()
}

/// A prompt of four blocks: the image covers half of the first block, the second and half of the
/// third.
fn about(image: MmHash, question: &'static [u32]) -> [Part; 3] {
    [Text(&[1, 2]), Image(image, 8), Text(question)]
}

const WHAT: &[u32] = &[10, 11, 12, 13, 14, 15];
const WHERE: &[u32] = &[20, 21, 22, 23, 24, 25];

#[test]
fn image_is_known_from_its_first_prompt_on() {
    let mut server = Server::new();
    let what = about(A, WHAT);
    let _answer = server.send(&what);
    server.store(0, 0, &what, &["a"]);
    server.fetch();
    assert_eq!(server.overlap(&what), 4);
    assert_eq!((server.overlap(&about(A, WHERE)), server.overlap(&about(B, WHAT))), (2, 0));

    // The blocks of another question continue the known chain.
    let _answer = server.send(&about(A, WHERE));
    server.emit(&stored(Some(1), &blocks(10, &about(A, WHERE), &["a"])[2..]));
    server.fetch();
    assert_eq!((server.overlap(&what), server.overlap(&about(A, WHERE))), (4, 4));
    server.remove(1);
    server.fetch();
    assert_eq!(server.overlap(&about(A, WHERE)), 1);
}

#[test]
fn learned_name_decides_between_two_images() {
    let mut server = Server::new();
    drop(server.send(&about(A, WHAT)));
    server.store(0, 0, &about(A, WHAT), &["a"]);
    server.fetch();
    // Both prompts are in flight, and the name of one image is known.
    let _answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHAT)));
    server.store(10, 0, &about(B, WHAT), &["b"]);
    server.fetch();
    assert_eq!((server.overlap(&about(A, WHAT)), server.overlap(&about(B, WHAT))), (4, 4));
    server.remove(0);
    server.fetch();
    assert_eq!((server.overlap(&about(A, WHAT)), server.overlap(&about(B, WHAT))), (0, 4));
}

#[test]
fn ambiguous_blocks_wait_until_one_image_is_known() {
    let mut server = Server::new();
    let answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHAT)));
    server.store(0, 0, &about(A, WHAT), &["a"]);
    server.store(10, 0, &about(B, WHAT), &["b"]);
    assert_eq!(server.fetch(), []);
    // Another question about one image identifies it, and so the other image too.
    let _answer = server.send(&about(A, WHERE));
    server.emit(&stored(Some(1), &blocks(20, &about(A, WHERE), &["a"])[2..]));
    server.fetch();
    let held = [about(A, WHAT), about(A, WHERE), about(B, WHAT), about(B, WHERE)]
        .map(|parts| server.overlap(&parts));
    assert_eq!(held, [4, 4, 4, 2]);
    drop(answers);
}

#[test]
fn later_text_decides_between_two_prompts() {
    let mut server = Server::new();
    let _answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHERE)));
    // The first two blocks are computed in one step, the others in the next.
    let first = &blocks(0, &about(A, WHAT), &["a"])[..2];
    server.emit(&stored(None, first));
    assert_eq!(server.fetch(), []);
    server.emit(&stored(Some(1), &blocks(0, &about(A, WHAT), &["a"])[2..]));
    server.fetch();
    assert_eq!((server.overlap(&about(A, WHAT)), server.overlap(&about(B, WHERE))), (4, 0));
}

#[test]
fn removed_or_void_waiting_blocks_are_dropped() {
    let ambiguous = || {
        let mut server = Server::new();
        let answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHAT)));
        server.store(0, 0, &about(A, WHAT), &["a"]);
        assert_eq!(server.fetch(), []);
        (server, answers)
    };
    let identify = |server: &mut Server| {
        let answer = server.send(&about(A, WHERE));
        server.emit(&stored(Some(1), &blocks(20, &about(A, WHERE), &["a"])[2..]));
        let translated = server.fetch();
        drop(answer);
        translated
    };
    let (mut server, _answers) = ambiguous();
    assert_ne!(identify(&mut server), []);
    assert_eq!(server.overlap(&about(A, WHAT)), 4);

    let (mut server, _answers) = ambiguous();
    server.remove(3);
    assert_eq!(server.fetch(), [], "a block that was never translated is not removed");
    identify(&mut server);
    assert_eq!(server.overlap(&about(A, WHAT)), 3);

    let (mut server, _answers) = ambiguous();
    server.remove(1);
    identify(&mut server);
    assert_eq!(server.overlap(&about(A, WHAT)), 0);

    let (mut server, answers) = ambiguous();
    drop(answers);
    server.now += Duration::from_secs(10);
    server.next += 1;
    identify(&mut server);
    assert_eq!((server.overlap(&about(A, WHAT)), server.translation.waiting()), (0, 0));

    let (mut server, _answers) = ambiguous();
    assert!(!server.translation.has_unlearned_names());
    server.now += Duration::from_secs(601);
    identify(&mut server);
    assert_eq!(
        (server.overlap(&about(A, WHAT)), server.translation.has_unlearned_names()),
        (0, true)
    );
}

#[test]
fn waiting_block_that_is_offloaded_keeps_its_tier() {
    let mut server = Server::new();
    let _answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHAT)));
    server.store(0, 0, &about(A, WHAT), &["a"]);
    let change = json!({"type": "event_diff", "new_value": 1, "old_value": 0});
    server.emit(
        &json!({"type": "updated", "block_hash": 0, "cache_level": change, "priority": null}),
    );
    assert_eq!(server.fetch(), []);
    let _answer = server.send(&about(A, WHERE));
    server.emit(&stored(Some(1), &blocks(20, &about(A, WHERE), &["a"])[2..]));
    let [KvEvent::BlockStored(first), KvEvent::BlockStored(then), KvEvent::BlockStored(_)] =
        &server.fetch()[..]
    else {
        panic!()
    };
    assert_eq!(
        (first.medium.as_deref(), &first.block_hashes[..]),
        (Some("CPU"), &[ExternalHash::U64(0)][..])
    );
    assert_eq!(
        (then.medium.as_deref(), &then.block_hashes[..]),
        (Some("GPU"), &[1, 22, 23].map(ExternalHash::U64)[..])
    );
}

#[test]
fn contradicted_name_is_learned_again() {
    let mut server = Server::new();
    // Another client has asked about B in the same words, while only A was sent from here.
    let answer = server.send(&about(A, WHAT));
    server.store(0, 0, &about(A, WHAT), &["b"]);
    server.fetch();
    drop(answer);
    server.now += Duration::from_secs(10);
    let _answer = server.send(&about(A, WHAT));
    server.store(10, 0, &about(A, WHAT), &["a"]);
    assert_eq!(server.fetch(), []);
    server.store(20, 0, &about(A, WHERE), &["x"]);
    server.fetch();
    server.remove(0);
    server.fetch();
    assert_eq!(server.overlap(&about(A, WHAT)), 4);
}

#[test]
fn differing_prompt_teaches_no_names() {
    let sent = about(A, WHAT);
    let others: [&[Part]; 5] = [
        &[Text(&[1, 3]), Image(A, 8), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 9), Text(WHAT)],
        &[Text(&[1]), Image(A, 9), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 4), Image(A, 4), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 8), Text(WHERE)],
    ];
    for (at, other) in others.into_iter().enumerate() {
        let mut server = Server::new();
        let _answer = server.send(&sent);
        server.store(0, 0, other, &["a", "b"]);
        server.fetch();
        assert_eq!(server.overlap(&sent), 0, "{at}");
    }
    // An image at another offset does not match.
    let mut server = Server::new();
    let _answer = server.send(&sent);
    let mut odd = blocks(0, &sent, &["a"]);
    odd[1]["mm_keys"][0]["start_offset"] = json!(3);
    server.emit(&stored(None, &odd));
    assert_eq!(server.fetch(), []);
    // A prompt whose answer ended long ago does not match.
    let mut server = Server::new();
    drop(server.send(&sent));
    server.now += Duration::from_secs(10);
    server.store(0, 0, &sent, &["a"]);
    assert_eq!(server.fetch(), []);
}

#[test]
fn answers_or_later_turns_extend_known_chains() {
    let mut server = Server::new();
    let first = about(A, &[10, 11, 12]);
    let _answer = server.send(&first);
    // The answer is 50 to 54.
    let all = [Text(&[1, 2]), Image(A, 8), Text(&[10, 11, 12, 50, 51, 52, 53, 54])];
    server.store(0, 0, &all[..], &["a"]);
    server.fetch();
    let turn = [&all[..], &[Image(B, 6), Text(&[60])]].concat();
    assert_eq!(server.overlap(&turn), 4);
    let _answer = server.send(&turn);
    server.store(0, 4, &turn, &["a", "b"]);
    server.fetch();
    assert_eq!(server.overlap(&turn), 6);
}

#[test]
fn several_images_of_a_prompt_are_learned() {
    let mut server = Server::new();
    // Two images in one block, one of them twice.
    let parts = [Text(&[1]), Image(A, 1), Image(B, 1), Image(B, 5), Text(&[3, 4, 5, 6])];
    let _answer = server.send(&parts);
    server.store(0, 0, &parts, &["a", "b", "b"]);
    server.fetch();
    assert_eq!(server.overlap(&parts), 3);
}

#[test]
fn image_reported_in_runs_or_as_a_span_is_learned() {
    // A marker, two embeddings, a break, two embeddings, an end; before them a token of text.
    let mask = [false, true, true, false, true, true, false];
    let tokens: Vec<TokenId> = [1, 90, 99, 99, 91, 99, 99, 92, 2, 3, 4, 5].map(TokenId).to_vec();
    let place = Placeholder { offset: 1, length: mask.len(), is_embed: Some(mask.to_vec()) };
    let prompt =
        || PredictedPrompt { tokens: Arc::new(tokens.clone()), items: vec![(A, place.clone())] };
    let token = |id: Value| json!({"token_id": id});
    let key = |offset: u64| json!({"type": "mm_key", "hash": "a", "start_offset": offset});
    let block = |hash: u64, ids: &[Value], keys: &[Value]| {
        let ids: Vec<Value> = ids.iter().cloned().map(token).collect();
        json!({"block_hash": hash, "tokens": ids, "cache_level": 0, "mm_keys": keys})
    };
    let text = block(2, &[json!(2), json!(3), json!(4), json!(5)], &[]);
    // Runs of embedding tokens, with the item's hash in place of its first token.
    let digest = "ab".repeat(32);
    let as_runs = [
        block(0, &[json!(1), json!(90), json!(digest), json!(101)], &[key(0)]),
        block(1, &[json!(91), json!(102), json!(103), json!(92)], &[key(2)]),
        text.clone(),
    ];
    // One span over the whole placeholder.
    let as_span = [
        block(0, &[json!(1), json!(101), json!(101), json!(101)], &[key(0)]),
        block(1, &[json!(101), json!(101), json!(101), json!(101)], &[key(3)]),
        text,
    ];
    for blocks in [as_runs, as_span] {
        let mut server = Server::new();
        let _answer = server.recent.begin(prompt());
        server.emit(&stored(None, &blocks));
        let [KvEvent::BlockStored(stored)] = &server.fetch()[..] else { panic!() };
        assert_eq!(stored.token_ids, tokens);
        assert_eq!(stored.block_hashes, [0, 1, 2].map(ExternalHash::U64));
        let media = MediaSpan { hash: A, offset: 1, length: mask.len() };
        let keys = block_keys(
            &PromptBlocks { tokens: &tokens, media: &[media], lora: None, salt: None },
            SIZE,
        );
        assert_eq!(server.index.overlaps(&keys)[0].1, 3);
    }
}

/// The form in Dynamo's test of TensorRT-LLM's newer cache manager: the hash also replaces an
/// item's first token, and text separates the tokens of an item.
#[test]
fn runs_of_two_items_in_one_block_are_separated() {
    let tokens: Vec<TokenId> = [1, 99, 99, 99, 99, 7, 99, 99, 99, 88, 88, 9].map(TokenId).to_vec();
    let parted = Some(vec![true, true, true, true, false, true, true, true]);
    let items = vec![
        (A, Placeholder { offset: 1, length: 8, is_embed: parted }),
        (B, Placeholder { offset: 9, length: 2, is_embed: None }),
    ];
    let names = ["a".repeat(64), "b".repeat(64)];
    let key = |(item, offset): &(usize, u64)| -> Value {
        json!({"type": "mm_key", "hash": names[*item], "start_offset": offset, "uuid": null})
    };
    let block = |hash: u64, ids: [Value; 4], keys: &[(usize, u64)]| {
        let ids =
            ids.map(|id| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0}));
        let keys: Vec<Value> = keys.iter().map(key).collect();
        json!({"block_hash": hash, "tokens": ids, "mm_keys": keys, "cache_level": 0})
    };
    let blocks = [
        block(101, [json!(1), json!(names[0]), json!(1001), json!(1002)], &[(0, 0)]),
        block(102, [json!(1003), json!(7), json!(1004), json!(1005)], &[(0, 3), (0, 4)]),
        block(103, [json!(1006), json!(names[1]), json!(1001), json!(9)], &[(0, 6), (1, 0)]),
    ];
    let mut server = Server::new();
    let _answer = server.recent.begin(PredictedPrompt { tokens: Arc::new(tokens.clone()), items });
    server.emit(&stored(None, &blocks));
    let [KvEvent::BlockStored(stored)] = &server.fetch()[..] else { panic!() };
    let media = |hash: MmHash, offset| ExtraKey::Media { identifier: hash.to_string(), offset };
    let items = [vec![media(A, 1)], vec![media(A, -3)], vec![media(A, -7), media(B, 1)]].map(Some);
    assert_eq!((&stored.token_ids, stored.extra_keys.as_deref()), (&tokens, Some(&items[..])));
}

#[test]
fn flood_of_names_is_bounded() {
    let mut server = Server::new();
    let _answers = (server.send(&about(A, WHAT)), server.send(&about(B, WHAT)));
    // Every prompt has another image, by its name.
    let names: Vec<String> = (0..3000).map(|at| at.to_string()).collect();
    for (at, name) in names.iter().enumerate() {
        server.store(at as u64 * 10, 0, &about(A, WHAT), &[name.as_str()]);
    }
    assert_eq!(server.fetch(), []);
    let waiting = server.translation.waiting();
    assert!(waiting <= 2048, "{waiting}");

    // Names that are too long, and more names than tokens.
    let mut server = Server::new();
    let _answer = server.send(&about(A, WHAT));
    server.store(0, 0, &about(A, WHAT), &["a".repeat(129).as_str()]);
    let mut many = blocks(10, &about(A, WHAT), &["a"]);
    many[0]["mm_keys"] = vec![many[0]["mm_keys"][0].clone(); 5].into();
    server.emit(&stored(None, &many));
    let mut odd = blocks(20, &about(A, WHAT), &["a"]);
    odd[0]["mm_keys"][0] = json!(["of a later version"]);
    server.emit(&stored(None, &odd));
    assert_eq!((server.fetch(), server.translation.waiting()), (Vec::new(), 0));
}

//! Images in events, by names that have to be learned.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chiasm_backend::ForeseenPrompt;
use chiasm_kv::event::{ExternalHash, ExtraKey, KvEvent};
use chiasm_kv::{MediaSpan, PrefixIndex, PromptBlocks, block_keys};
use chiasm_types::{BlockSize, MmHash, Placeholder, TokenId, WorkerId};
use serde_json::{Value, json};

use super::asked::{Asked, InFlight};
use super::events::Translation;

const SIZE: BlockSize = BlockSize::new(4).unwrap();
const WORKER: WorkerId = WorkerId(0);
/// What stands for an image in our prompts, and the first number that is no token.
const IMAGE: u32 = 99;
const VOCABULARY: u32 = 100;

const A: MmHash = MmHash::new([0xa; 32]);
const B: MmHash = MmHash::new([0xb; 32]);

/// A prompt in parts: text, or an image of so many tokens.
#[derive(Clone, Copy)]
enum Part {
    Text(&'static [u32]),
    Image(MmHash, usize),
}
use Part::{Image, Text};

fn foreseen(parts: &[Part]) -> ForeseenPrompt {
    let (mut tokens, mut items) = (Vec::new(), Vec::new());
    for part in parts {
        match *part {
            Text(text) => tokens.extend(text.iter().copied().map(TokenId)),
            Image(hash, length) => {
                items.push((hash, Placeholder { offset: tokens.len(), length, is_embed: None }));
                tokens.extend(vec![TokenId(IMAGE); length]);
            }
        }
    }
    ForeseenPrompt { tokens: Arc::new(tokens), items }
}

/// A server before a frontend that knows what it holds.
struct Server {
    asked: Arc<Asked>,
    translation: Translation,
    index: PrefixIndex,
    next: u64,
    now: Instant,
    untold: Vec<Value>,
}

impl Server {
    fn new() -> Self {
        let index = PrefixIndex::new();
        index.add_worker(WORKER, SIZE);
        let asked = Arc::new(Asked::new(SIZE));
        let translation = Translation::new(asked.clone());
        Self { asked, translation, index, next: 0, now: Instant::now(), untold: Vec::new() }
    }

    fn ask(&self, parts: &[Part]) -> InFlight {
        self.asked.begin(foreseen(parts))
    }

    fn happens(&mut self, data: &Value) {
        self.untold.push(json!({"event_id": self.next, "data": data, "window_size": 4096}));
        self.next += 1;
    }

    /// It stores the blocks of a prompt behind one that it has, numbered from here on. Its names of
    /// images are `name` and the place.
    fn stores(&mut self, from: u64, behind: usize, parts: &[Part], names: &[&str]) {
        let blocks = blocks(from, parts, names);
        let parent = (behind > 0).then(|| from + behind as u64 - 1);
        self.happens(&json!({"type": "stored", "parent_hash": parent, "blocks": blocks[behind..]}));
    }

    fn removes(&mut self, hash: u64) {
        self.happens(&json!({"type": "removed", "block_hashes": [hash]}));
    }

    /// Its events are asked for; what they become.
    fn tells(&mut self) -> Vec<KvEvent> {
        let answer = Value::from(std::mem::take(&mut self.untold)).to_string();
        let told = self.translation.take(answer.as_bytes(), self.now).unwrap();
        if told.is_void {
            self.index.clear(WORKER);
        }
        let batch = told.batch;
        batch.iter().for_each(|batch| drop(self.index.apply(WORKER, batch)));
        batch.map_or_else(Vec::new, |batch| batch.events)
    }

    /// How many blocks of a prompt it is known to hold.
    fn holds(&self, parts: &[Part]) -> usize {
        let ForeseenPrompt { tokens, items } = foreseen(parts);
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

/// The blocks of a prompt as a server tells of them: with numbers that are no tokens in the place
/// of its images.
fn blocks(from: u64, parts: &[Part], names: &[&str]) -> Vec<Value> {
    let ForeseenPrompt { tokens, items } = foreseen(parts);
    let blocks = tokens.chunks(SIZE.get()).enumerate().map(|(at, chunk)| {
        let begin = at * SIZE.get();
        let id = |(at, token): (usize, &TokenId)| {
            let in_image = items.iter().any(|(_, place)| (place.offset..place.offset + place.length).contains(&at));
            json!({"type": "unique_token", "token_id": if in_image { VOCABULARY + 1 } else { token.0 }, "token_extra_id": 0})
        };
        let ids: Vec<Value> = (begin..).zip(chunk).map(id).collect();
        let key = |(name, (_, place)): (&&str, &(MmHash, Placeholder))| {
            let touches = place.offset < begin + chunk.len() && place.offset + place.length > begin;
            touches.then(|| json!({"type": "mm_key", "hash": name, "start_offset": begin.saturating_sub(place.offset)}))
        };
        let keys: Vec<Value> = names.iter().zip(&items).filter_map(key).collect();
        json!({"type": "stored_block", "block_hash": from + at as u64, "tokens": ids, "cache_level": 0, "priority": 35,
            "mm_keys": keys, "cache_salt": null})
    });
    blocks.collect()
}

/// Two blocks and a half with an image, and then some.
fn about(image: MmHash, question: &'static [u32]) -> [Part; 3] {
    [Text(&[1, 2]), Image(image, 8), Text(question)]
}

const WHAT: &[u32] = &[10, 11, 12, 13, 14, 15];
const WHERE: &[u32] = &[20, 21, 22, 23, 24, 25];

#[test]
fn an_image_is_known_from_its_first_prompt_on() {
    let mut server = Server::new();
    let what = about(A, WHAT);
    let _answer = server.ask(&what);
    server.stores(0, 0, &what, &["a"]);
    server.tells();
    assert_eq!(server.holds(&what), 4);
    assert_eq!((server.holds(&about(A, WHERE)), server.holds(&about(B, WHAT))), (2, 0));

    // What is told of another question goes on behind what is known.
    let _answer = server.ask(&about(A, WHERE));
    server.happens(&json!({"type": "stored", "parent_hash": 1, "blocks": blocks(10, &about(A, WHERE), &["a"])[2..]}));
    server.tells();
    assert_eq!((server.holds(&what), server.holds(&about(A, WHERE))), (4, 4));
    server.removes(1);
    server.tells();
    assert_eq!(server.holds(&about(A, WHERE)), 1);
}

#[test]
fn other_images_in_the_same_place_are_told_apart() {
    let mut server = Server::new();
    drop(server.ask(&about(A, WHAT)));
    server.stores(0, 0, &about(A, WHAT), &["a"]);
    server.tells();
    // Both are in flight, and one of them is known.
    let _answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHAT)));
    server.stores(10, 0, &about(B, WHAT), &["b"]);
    server.tells();
    assert_eq!((server.holds(&about(A, WHAT)), server.holds(&about(B, WHAT))), (4, 4));
    server.removes(0);
    server.tells();
    assert_eq!((server.holds(&about(A, WHAT)), server.holds(&about(B, WHAT))), (0, 4));
}

#[test]
fn blocks_that_may_be_of_two_prompts_wait_until_one_of_them_is_known() {
    let mut server = Server::new();
    let answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHAT)));
    server.stores(0, 0, &about(A, WHAT), &["a"]);
    server.stores(10, 0, &about(B, WHAT), &["b"]);
    assert_eq!(server.tells(), []);
    // One that is asked about in other words is known, and so is then the other one.
    let _answer = server.ask(&about(A, WHERE));
    server.happens(&json!({"type": "stored", "parent_hash": 1, "blocks": blocks(20, &about(A, WHERE), &["a"])[2..]}));
    server.tells();
    let held = [about(A, WHAT), about(A, WHERE), about(B, WHAT), about(B, WHERE)]
        .map(|parts| server.holds(&parts));
    assert_eq!(held, [4, 4, 4, 2]);
    drop(answers);
}

#[test]
fn a_question_tells_prompts_apart_that_are_in_flight_together() {
    let mut server = Server::new();
    let _answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHERE)));
    // The first two blocks are computed in one step, the others in the next.
    let first = &blocks(0, &about(A, WHAT), &["a"])[..2];
    server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": first}));
    assert_eq!(server.tells(), []);
    server.happens(&json!({"type": "stored", "parent_hash": 1, "blocks": blocks(0, &about(A, WHAT), &["a"])[2..]}));
    server.tells();
    assert_eq!((server.holds(&about(A, WHAT)), server.holds(&about(B, WHERE))), (4, 0));
}

#[test]
fn what_is_gone_or_void_is_not_told_any_more() {
    let ambiguous = || {
        let mut server = Server::new();
        let answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHAT)));
        server.stores(0, 0, &about(A, WHAT), &["a"]);
        assert_eq!(server.tells(), []);
        (server, answers)
    };
    let shows = |server: &mut Server| {
        let answer = server.ask(&about(A, WHERE));
        server
            .happens(&json!({"type": "stored", "parent_hash": 1, "blocks": blocks(20, &about(A, WHERE), &["a"])[2..]}));
        let told = server.tells();
        drop(answer);
        told
    };
    let (mut server, _answers) = ambiguous();
    assert_ne!(shows(&mut server), []);
    assert_eq!(server.holds(&about(A, WHAT)), 4);

    let (mut server, _answers) = ambiguous();
    server.removes(3);
    assert_eq!(server.tells(), [], "of what was never told nothing is told");
    shows(&mut server);
    assert_eq!(server.holds(&about(A, WHAT)), 3);

    let (mut server, _answers) = ambiguous();
    server.removes(1);
    shows(&mut server);
    assert_eq!(server.holds(&about(A, WHAT)), 0);

    let (mut server, answers) = ambiguous();
    drop(answers);
    server.now += Duration::from_secs(10);
    server.next += 1;
    shows(&mut server);
    assert_eq!((server.holds(&about(A, WHAT)), server.translation.waiting()), (0, 0));

    let (mut server, _answers) = ambiguous();
    assert!(!server.translation.is_at_a_loss());
    server.now += Duration::from_secs(601);
    shows(&mut server);
    assert_eq!((server.holds(&about(A, WHAT)), server.translation.is_at_a_loss()), (0, true));
}

#[test]
fn a_block_that_is_offloaded_while_it_waits_is_told_where_it_is() {
    let mut server = Server::new();
    let _answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHAT)));
    server.stores(0, 0, &about(A, WHAT), &["a"]);
    let change = json!({"type": "event_diff", "new_value": 1, "old_value": 0});
    server.happens(
        &json!({"type": "updated", "block_hash": 0, "cache_level": change, "priority": null}),
    );
    assert_eq!(server.tells(), []);
    let _answer = server.ask(&about(A, WHERE));
    server.happens(&json!({"type": "stored", "parent_hash": 1, "blocks": blocks(20, &about(A, WHERE), &["a"])[2..]}));
    let [KvEvent::BlockStored(first), KvEvent::BlockStored(then), KvEvent::BlockStored(_)] =
        &server.tells()[..]
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
fn a_name_that_is_contradicted_is_learned_again() {
    let mut server = Server::new();
    // Somebody else has asked about B, in the same words, while A alone was asked about here.
    let answer = server.ask(&about(A, WHAT));
    server.stores(0, 0, &about(A, WHAT), &["b"]);
    server.tells();
    drop(answer);
    server.now += Duration::from_secs(10);
    let _answer = server.ask(&about(A, WHAT));
    server.stores(10, 0, &about(A, WHAT), &["a"]);
    assert_eq!(server.tells(), []);
    server.stores(20, 0, &about(A, WHERE), &["x"]);
    server.tells();
    server.removes(0);
    server.tells();
    assert_eq!(server.holds(&about(A, WHAT)), 4);
}

#[test]
fn nothing_is_learned_of_a_prompt_that_differs_in_anything() {
    let asked = about(A, WHAT);
    let others: [&[Part]; 5] = [
        &[Text(&[1, 3]), Image(A, 8), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 9), Text(WHAT)],
        &[Text(&[1]), Image(A, 9), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 4), Image(A, 4), Text(WHAT)],
        &[Text(&[1, 2]), Image(A, 8), Text(WHERE)],
    ];
    for (at, other) in others.into_iter().enumerate() {
        let mut server = Server::new();
        let _answer = server.ask(&asked);
        server.stores(0, 0, other, &["a", "b"]);
        server.tells();
        assert_eq!(server.holds(&asked), 0, "{at}");
    }
    // Nor of an image that begins elsewhere.
    let mut server = Server::new();
    let _answer = server.ask(&asked);
    let mut odd = blocks(0, &asked, &["a"]);
    odd[1]["mm_keys"][0]["start_offset"] = json!(3);
    server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": odd}));
    assert_eq!(server.tells(), []);
    // Nor of one whose answer has ended long ago.
    let mut server = Server::new();
    drop(server.ask(&asked));
    server.now += Duration::from_secs(10);
    server.stores(0, 0, &asked, &["a"]);
    assert_eq!(server.tells(), []);
}

#[test]
fn answers_and_later_turns_go_on_behind_images() {
    let mut server = Server::new();
    let first = about(A, &[10, 11, 12]);
    let _answer = server.ask(&first);
    // Its answer is 50 to 54.
    let all = [Text(&[1, 2]), Image(A, 8), Text(&[10, 11, 12, 50, 51, 52, 53, 54])];
    server.stores(0, 0, &all[..], &["a"]);
    server.tells();
    let turn = [&all[..], &[Image(B, 6), Text(&[60])]].concat();
    assert_eq!(server.holds(&turn), 4);
    let _answer = server.ask(&turn);
    server.stores(0, 4, &turn, &["a", "b"]);
    server.tells();
    assert_eq!(server.holds(&turn), 6);
}

#[test]
fn several_images_are_known_each_by_its_name() {
    let mut server = Server::new();
    // Two in one block, one of them twice.
    let parts = [Text(&[1]), Image(A, 1), Image(B, 1), Image(B, 5), Text(&[3, 4, 5, 6])];
    let _answer = server.ask(&parts);
    server.stores(0, 0, &parts, &["a", "b", "b"]);
    server.tells();
    assert_eq!(server.holds(&parts), 3);
}

#[test]
fn an_image_whose_tokens_are_told_in_other_ways_is_known_too() {
    // A marker, two embeddings, a break, two embeddings, an end; in front of it a token of text.
    let mask = [false, true, true, false, true, true, false];
    let tokens: Vec<TokenId> = [1, 90, 99, 99, 91, 99, 99, 92, 2, 3, 4, 5].map(TokenId).to_vec();
    let place = Placeholder { offset: 1, length: mask.len(), is_embed: Some(mask.to_vec()) };
    let prompt =
        || ForeseenPrompt { tokens: Arc::new(tokens.clone()), items: vec![(A, place.clone())] };
    let token = |id: Value| json!({"token_id": id});
    let key = |offset: u64| json!({"type": "mm_key", "hash": "a", "start_offset": offset});
    let block = |hash: u64, ids: &[Value], keys: &[Value]| {
        let ids: Vec<Value> = ids.iter().cloned().map(token).collect();
        json!({"block_hash": hash, "tokens": ids, "cache_level": 0, "mm_keys": keys})
    };
    let text = block(2, &[json!(2), json!(3), json!(4), json!(5)], &[]);
    // By runs of what embeds, with the item's hash in the place of its first token.
    let digest = "ab".repeat(32);
    let of_runs = [
        block(0, &[json!(1), json!(90), json!(digest), json!(101)], &[key(0)]),
        block(1, &[json!(91), json!(102), json!(103), json!(92)], &[key(2)]),
        text.clone(),
    ];
    // As one span of all of the placeholder.
    let of_span = [
        block(0, &[json!(1), json!(101), json!(101), json!(101)], &[key(0)]),
        block(1, &[json!(101), json!(101), json!(101), json!(101)], &[key(3)]),
        text,
    ];
    for blocks in [of_runs, of_span] {
        let mut server = Server::new();
        let _answer = server.asked.begin(prompt());
        server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": blocks}));
        let [KvEvent::BlockStored(stored)] = &server.tells()[..] else { panic!() };
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

/// The form of Dynamo's test of what TensorRT-LLM's newer cache manager tells: the hash stands in
/// the place of an item's first token as well, and text parts the tokens of an item.
#[test]
fn runs_of_two_items_in_one_block_are_told_apart() {
    let tokens: Vec<TokenId> = [1, 99, 99, 99, 99, 7, 99, 99, 99, 88, 88, 9].map(TokenId).to_vec();
    let parted = Some(vec![true, true, true, true, false, true, true, true]);
    let items = vec![
        (A, Placeholder { offset: 1, length: 8, is_embed: parted }),
        (B, Placeholder { offset: 9, length: 2, is_embed: None }),
    ];
    let names = ["a".repeat(64), "b".repeat(64)];
    let key = |(item, offset): &(usize, u64)| json!({"type": "mm_key", "hash": names[*item], "start_offset": offset, "uuid": null});
    let block = |hash: u64, ids: [Value; 4], keys: &[(usize, u64)]| {
        let ids =
            ids.map(|id| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0}));
        json!({"block_hash": hash, "tokens": ids, "mm_keys": keys.iter().map(key).collect::<Vec<_>>(), "cache_level": 0})
    };
    let blocks = [
        block(101, [json!(1), json!(names[0]), json!(1001), json!(1002)], &[(0, 0)]),
        block(102, [json!(1003), json!(7), json!(1004), json!(1005)], &[(0, 3), (0, 4)]),
        block(103, [json!(1006), json!(names[1]), json!(1001), json!(9)], &[(0, 6), (1, 0)]),
    ];
    let mut server = Server::new();
    let _answer = server.asked.begin(ForeseenPrompt { tokens: Arc::new(tokens.clone()), items });
    server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": blocks}));
    let [KvEvent::BlockStored(stored)] = &server.tells()[..] else { panic!() };
    let media = |hash: MmHash, offset| ExtraKey::Media { identifier: hash.to_string(), offset };
    let marks = [vec![media(A, 1)], vec![media(A, -3)], vec![media(A, -7), media(B, 1)]].map(Some);
    assert_eq!((&stored.token_ids, stored.extra_keys.as_deref()), (&tokens, Some(&marks[..])));
}

#[test]
fn a_server_that_floods_takes_what_is_bounded() {
    let mut server = Server::new();
    let _answers = (server.ask(&about(A, WHAT)), server.ask(&about(B, WHAT)));
    // Each of another image, as it says.
    let names: Vec<String> = (0..3000).map(|at| at.to_string()).collect();
    for (at, name) in names.iter().enumerate() {
        server.stores(at as u64 * 10, 0, &about(A, WHAT), &[name.as_str()]);
    }
    assert_eq!(server.tells(), []);
    let waiting = server.translation.waiting();
    assert!(waiting <= 2048, "{waiting}");

    // Names that are too long, and more of them than there are tokens.
    let mut server = Server::new();
    let _answer = server.ask(&about(A, WHAT));
    server.stores(0, 0, &about(A, WHAT), &["a".repeat(129).as_str()]);
    let mut many = blocks(10, &about(A, WHAT), &["a"]);
    many[0]["mm_keys"] = vec![many[0]["mm_keys"][0].clone(); 5].into();
    server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": many}));
    let mut odd = blocks(20, &about(A, WHAT), &["a"]);
    odd[0]["mm_keys"][0] = json!(["of a later version"]);
    server.happens(&json!({"type": "stored", "parent_hash": null, "blocks": odd}));
    assert_eq!((server.tells(), server.translation.waiting()), (Vec::new(), 0));
}

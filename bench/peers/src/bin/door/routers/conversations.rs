//! Conversations about shared pictures: a few pictures are frequent and most are rare.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use peers::numbers::Zipf;

use crate::load;
use crate::picture::Format;
use crate::pieces::Pieces;
use crate::routers::prompt::{BLOCK_SIZE, PICTURE_TOKENS};
use crate::workload::{MODEL, Workload};

/// The number of pictures.
const PICTURES: usize = 256;
/// The part of the pictures' tokens for which all upstreams together have room.
const ROOM: f64 = 0.75;
/// The maximum number of questions of a conversation.
pub(crate) const TURNS: usize = 3;
/// The numbers of words of the shared system prompt, of a question and of an answer.
const SYSTEM_WORDS: usize = 100;
const QUESTION_WORDS: usize = 20;
const ANSWER_WORDS: usize = 4;
/// The seed of all conversations. The number has no meaning.
const SEED: u64 = 20_261_125;
const TIMEOUT: Duration = Duration::from_secs(300);

/// Returns the number of blocks of all upstreams together.
pub(crate) fn blocks() -> usize {
    (PICTURES as f64 * ROOM * PICTURE_TOKENS as f64 / BLOCK_SIZE as f64) as usize
}

/// Conversations that are the same for every router.
pub(crate) struct Conversations<'a> {
    workload: &'a RefCell<Workload>,
    pictures: Vec<[Bytes; 2]>,
    law: Zipf,
    system: String,
}

impl<'a> Conversations<'a> {
    pub(crate) fn new(workload: &'a RefCell<Workload>) -> Self {
        let borrowed = workload.borrow();
        let pictures = (0..PICTURES as u64).map(|number| borrowed.picture(number)).collect();
        let system = borrowed.words().text(SYSTEM_WORDS, &mut Rng::with_seed(SEED));
        Self { workload, pictures, law: Zipf::new(PICTURES), system }
    }

    /// Holds `count` conversations of `turns` questions with concurrent clients, each of which
    /// begins a conversation when its last one ends. Returns the time of each answer in ms.
    pub(crate) async fn hold(
        &self,
        address: SocketAddr,
        (count, turns): (usize, usize),
        clients: usize,
    ) -> Result<Vec<f64>, Box<dyn Error>> {
        let next = &Cell::new(0);
        let clients = (0..clients).map(|_| {
            let numbers = std::iter::from_fn(move || {
                let number = next.replace(next.get() + 1);
                (number < count).then_some(number)
            });
            let requests =
                numbers.flat_map(move |number| self.requests(number).into_iter().take(turns));
            requests.map(|body| ((), body))
        });
        let keep = |(), latency: Duration, _, _| Ok(latency.as_secs_f64() * 1e3);
        Ok(load::send(&[address], clients, TIMEOUT, keep).await?.results)
    }

    /// Returns the requests of a conversation, each with all messages so far.
    fn requests(&self, number: usize) -> [Pieces; TURNS] {
        let mut rng = Rng::with_seed(SEED + 1 + number as u64);
        let [first, second] = &self.pictures[self.law.draw(&mut rng)];
        let system = format!(r#"{{"role":"system","content":"{}"}}"#, self.system);
        let data_uri = Format::Jpeg.data_uri();
        let image = format!(r#"{{"type":"image_url","image_url":{{"url":"{data_uri}"#);
        let options = format!(r#""model":"{MODEL}","max_tokens":4"#);
        let user = format!(r#"{{"role":"user","content":[{image}"#);
        let head = Bytes::from(format!(r#"{{{options},"messages":[{system},{user}"#));
        let workload = self.workload.borrow();
        let mut text = |words| workload.words().text(words, &mut rng);
        let question = text(QUESTION_WORDS);
        let mut messages = format!(r#""}}}},{{"type":"text","text":"{question}"}}]}}"#);
        std::array::from_fn(|turn| {
            if turn > 0 {
                let answer = text(ANSWER_WORDS);
                let question = text(QUESTION_WORDS);
                messages += &format!(r#",{{"role":"assistant","content":"{answer}"}}"#);
                messages += &format!(r#",{{"role":"user","content":"{question}"}}"#);
            }
            let tail = format!("{messages}]}}").into();
            [head.clone(), first.clone(), second.clone(), tail].into()
        })
    }
}

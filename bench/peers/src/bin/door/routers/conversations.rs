//! Conversations about pictures that several of them share: a few pictures are asked about often
//! and most seldom, each time something else.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::try_join_all;
use peers::body::Pieces;
use peers::numbers::Zipf;
use tokio::time::timeout;

use crate::client::Connection;
use crate::routers::prompt::{BLOCK, PICTURE_TOKENS};
use crate::workload::{MODEL, Workload};

/// Pictures that conversations are about.
pub(crate) const PICTURES: usize = 256;
/// The part of their tokens that all upstreams together have room for.
const ROOM: f64 = 0.75;
/// Most questions of a conversation, each after all before it and their answers.
pub(crate) const TURNS: usize = 3;
/// Words of the system prompt, which all conversations have, of a question and of an answer.
const SYSTEM_WORDS: usize = 100;
const QUESTION_WORDS: usize = 20;
const ANSWER_WORDS: usize = 4;
/// Seed of what all of them have. The number has no meaning.
const SEED: u64 = 20_261_125;
/// How long all of them may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// Blocks that all upstreams together have room for.
pub(crate) fn blocks() -> usize {
    (PICTURES as f64 * ROOM * PICTURE_TOKENS as f64 / BLOCK as f64) as usize
}

/// The same for every router.
pub(crate) struct Conversations<'a> {
    workload: &'a RefCell<Workload>,
    pictures: Vec<[Bytes; 2]>,
    /// Shares of the conversations that are about each.
    law: Zipf,
    system: String,
}

impl<'a> Conversations<'a> {
    pub(crate) fn new(workload: &'a RefCell<Workload>) -> Self {
        let (pictures, system) = {
            let workload = workload.borrow();
            let pictures = (0..PICTURES).map(|number| workload.picture(number as u64)).collect();
            (pictures, workload.words().text(SYSTEM_WORDS, &mut Rng::with_seed(SEED)))
        };
        Self { workload, pictures, law: Zipf::new(PICTURES), system }
    }

    /// Has so many conversations of so many questions, with so many clients at once, each of which
    /// begins another when one is over. Returns the time that each answer took.
    pub(crate) async fn all(
        &self,
        address: SocketAddr,
        (count, turns): (usize, usize),
        clients: usize,
    ) -> Result<Vec<Duration>, Box<dyn Error>> {
        let next = Cell::new(0);
        let clients = (0..clients).map(async |_| {
            let (mut connection, mut times) = (Connection::open(address).await?, Vec::new());
            loop {
                let number = next.replace(next.get() + 1);
                if number >= count {
                    return Ok::<_, Box<dyn Error>>(times);
                }
                for body in self.turns(number).into_iter().take(turns) {
                    let start = Instant::now();
                    connection.chat(body).await?;
                    times.push(start.elapsed());
                }
            }
        });
        let times = timeout(PATIENCE, try_join_all(clients)).await.map_err(|_| "some conversations never end")??;
        Ok(times.concat())
    }

    /// The requests of a conversation.
    fn turns(&self, number: usize) -> [Pieces; TURNS] {
        let mut rng = Rng::with_seed(SEED + 1 + number as u64);
        let [first, second] = &self.pictures[self.law.draw(&mut rng)];
        let system = &self.system;
        let head = Bytes::from(format!(
            r#"{{"model":"{MODEL}","max_tokens":4,"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/jpeg;base64,"#
        ));
        let workload = self.workload.borrow();
        let mut text = |words| workload.words().text(words, &mut rng);
        let mut said = format!(r#""}}}},{{"type":"text","text":"{}"}}]}}"#, text(QUESTION_WORDS));
        std::array::from_fn(|turn| {
            if turn > 0 {
                let [answer, question] = [text(ANSWER_WORDS), text(QUESTION_WORDS)];
                said += &format!(
                    r#",{{"role":"assistant","content":"{answer}"}},{{"role":"user","content":"{question}"}}"#
                );
            }
            [head.clone(), first.clone(), second.clone(), format!("{said}]}}").into()].into()
        })
    }
}

//! All sides get the same requests, round by round, in an order that turns round; what comes of it.

use std::error::Error;
use std::time::Duration;

use peers::body::Pieces;
use peers::numbers::{median, quantile};
use serde::Serialize;

use crate::client::{Answers, ask};
use crate::group::Cpu;
use crate::replay::{self, Replay};
use crate::side::Side;
use crate::workload::{ANSWER_TOKENS, Workload};

/// Requests in flight.
const CLIENTS: usize = 8;
/// How long a side gets, after its last answer, for what it does behind them.
const SETTLE: Duration = Duration::from_millis(50);

/// One side's result.
#[derive(Debug, Serialize)]
pub(crate) struct Measurement {
    case: String,
    /// `chiasm`, `engines alone`, or a peer's name and version.
    side: String,
    metric: &'static str,
    value: f64,
}

/// What came of one round of one side.
struct Turn {
    /// Milliseconds, one per request.
    ttft: Vec<f64>,
    /// Seconds.
    wall: f64,
    prompt_tokens: u64,
    cached_tokens: u64,
    /// Prompt tokens of each request; none of the engines alone, as they get what `chiasm` has
    /// counted.
    lengths: Vec<u64>,
    cpu: Cpu,
    /// Seconds of CPU time that all other sides have spent meanwhile.
    others: f64,
}

impl Turn {
    fn requests_per_second(&self) -> f64 {
        self.ttft.len() as f64 / self.wall
    }
}

/// All sides, of which the first is ours, and what they have done.
struct Round<'a> {
    sides: &'a mut [Side],
    replay: Replay,
    /// Rounds of each side, and at last those of the engines alone.
    turns: Vec<Vec<Turn>>,
}

/// Asks for each picture, then once for what nobody counts, then round by round.
pub(crate) async fn measure(
    case: &str,
    sides: &mut [Side],
    replay: Replay,
    workload: &mut Workload,
    rounds: usize,
) -> Result<Vec<Measurement>, Box<dyn Error>> {
    let mut all = Round { turns: Vec::new(), sides, replay };
    eprintln!("warming up");
    all.run(&workload.each(), 0).await?;
    all.run(&workload.round(), 0).await?;
    all.turns.clear();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        all.run(&workload.round(), round).await?;
    }
    let ours = &all.turns[0];
    let names = all.sides.iter().map(|side| side.name.as_str()).chain([replay::NAME]);
    Ok(names.zip(&all.turns).flat_map(|(name, turns)| summary(case, name, turns, ours)).collect())
}

impl Round<'_> {
    /// Sends the same requests to all sides, in an order that begins with another one each time.
    async fn run(&mut self, requests: &[Pieces], round: usize) -> Result<(), Box<dyn Error>> {
        let count = self.sides.len();
        self.turns.resize_with(count + 1, Vec::new);
        for turn in 0..count {
            let number = (turn + round) % count;
            let before = self.cpu()?;
            let answers = ask(self.sides[number].address, requests, CLIENTS).await;
            let answers = answers.map_err(|error| self.sides[number].group.failed(&format!("was asked: {error}")))?;
            let workers: Option<Vec<usize>> = answers.answers.iter().map(|answer| answer.worker).collect();
            let turn = self.counted(number, &before, of_answers(&answers)?).await?;
            eprintln!("  {}: {:.1} requests per second", self.sides[number].name, turn.requests_per_second());
            self.turns[number].push(turn);
            if number == 0 {
                self.replay(requests, &workers.ok_or("an answer does not tell its worker")?).await?;
            }
        }
        Ok(())
    }

    /// Sends the requests to engines alone, each to the worker of this number.
    async fn replay(&mut self, requests: &[Pieces], workers: &[usize]) -> Result<(), Box<dyn Error>> {
        self.replay.record(requests).await?;
        tokio::time::sleep(SETTLE).await;
        let before = self.cpu()?;
        let replayed = self.replay.replay(CLIENTS, workers).await?;
        if replayed.ttft.len() != requests.len() || replayed.tokens != ANSWER_TOKENS * requests.len() as u64 {
            return Err(format!("{} were replayed, {} tokens", replayed.ttft.len(), replayed.tokens).into());
        }
        let turn = Turn {
            ttft: replayed.ttft,
            wall: replayed.wall,
            prompt_tokens: replayed.prompt_tokens,
            cached_tokens: replayed.cached_tokens,
            lengths: Vec::new(),
            cpu: Cpu::default(),
            others: 0.0,
        };
        let number = self.sides.len();
        let turn = self.counted(number, &before, turn).await?;
        eprintln!("  {}: {:.1} requests per second", replay::NAME, turn.requests_per_second());
        self.turns[number].push(turn);
        Ok(())
    }

    /// A turn of the side of this number with what was spent since `before`.
    async fn counted(&self, number: usize, before: &[Cpu], turn: Turn) -> Result<Turn, Box<dyn Error>> {
        tokio::time::sleep(SETTLE).await;
        let spent: Vec<Cpu> = self.cpu()?.iter().zip(before).map(|(now, before)| now.since(*before)).collect();
        let others = spent.iter().enumerate().filter(|&(other, _)| other != number);
        let others = others.map(|(_, cpu)| cpu.frontend + cpu.engines).sum();
        Ok(Turn { cpu: spent[number], others, ..turn })
    }

    fn cpu(&self) -> Result<Vec<Cpu>, Box<dyn Error>> {
        self.sides.iter().map(|side| &side.group).chain([&self.replay.group]).map(|group| group.cpu()).collect()
    }
}

fn of_answers(Answers { answers, wall }: &Answers) -> Result<Turn, Box<dyn Error>> {
    if let Some(answer) = answers.iter().find(|answer| answer.usage.completion_tokens != ANSWER_TOKENS) {
        return Err(format!("{:?}, not {ANSWER_TOKENS} tokens", answer.usage).into());
    }
    let ttft: Option<Vec<f64>> = answers.iter().map(|answer| Some(answer.ttft?.as_secs_f64() * 1e3)).collect();
    let lengths: Vec<u64> = answers.iter().map(|answer| answer.usage.prompt_tokens).collect();
    Ok(Turn {
        ttft: ttft.ok_or("an answer has no text")?,
        wall: wall.as_secs_f64(),
        prompt_tokens: lengths.iter().sum(),
        cached_tokens: answers.iter().map(|answer| answer.usage.cached_tokens()).sum(),
        lengths,
        cpu: Cpu::default(),
        others: 0.0,
    })
}

fn summary(case: &str, name: &str, turns: &[Turn], ours: &[Turn]) -> Vec<Measurement> {
    let of = |number: &dyn Fn(&Turn) -> f64| turns.iter().map(number).collect::<Vec<f64>>();
    let sum = |number: &dyn Fn(&Turn) -> f64| of(number).iter().sum::<f64>();
    let mut ttft: Vec<f64> = turns.iter().flat_map(|turn| turn.ttft.iter().copied()).collect();
    ttft.sort_by(f64::total_cmp);
    let requests = ttft.len() as f64;
    let is_ours = std::ptr::eq(turns, ours);
    let mut values = vec![
        ("requests per second", median(of(&Turn::requests_per_second))),
        ("TTFT p50", quantile(&ttft, 0.5)),
        ("TTFT p90", quantile(&ttft, 0.9)),
        ("cached prompt tokens", 100.0 * sum(&|it| it.cached_tokens as f64) / sum(&|it| it.prompt_tokens as f64)),
        ("engines' CPU per request", 1e3 * sum(&|it| it.cpu.engines) / requests),
        ("CPU of the other sides", sum(&|it| it.others) / sum(&|it| it.wall)),
    ];
    if name != replay::NAME {
        values.push(("frontend's CPU per request", 1e3 * sum(&|it| it.cpu.frontend) / requests));
    }
    if !is_ours {
        // In one round all get the same requests, at nearly the same time.
        let pairs = ours.iter().zip(turns).map(|(ours, it)| ours.requests_per_second() / it.requests_per_second());
        values.push(("our part of its requests per second", median(pairs.collect())));
        let lengths = ours.iter().zip(turns).flat_map(|(ours, it)| ours.lengths.iter().zip(&it.lengths));
        let (compared, different) = (lengths.clone().count(), lengths.filter(|(ours, it)| ours != it).count());
        if compared > 0 {
            values.extend([("compared", compared as f64), ("different", different as f64)]);
        }
    }
    let measurement = |(metric, value)| Measurement { case: case.to_owned(), side: name.to_owned(), metric, value };
    values.into_iter().map(measurement).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn turn(ttft: f64, wall: f64) -> Turn {
        let cpu = Cpu { frontend: 0.5, engines: 1.0 };
        let ttft = vec![ttft; 10];
        Turn { ttft, wall, prompt_tokens: 100, cached_tokens: 50, lengths: vec![10; 10], cpu, others: 0.0 }
    }

    #[test]
    fn rates_are_compared_round_by_round() {
        let ours = [turn(1.0, 1.0), turn(3.0, 2.0), turn(2.0, 4.0)];
        let theirs = [turn(1.0, 2.0), turn(3.0, 2.0), turn(2.0, 3.0)];
        let all = summary("all", "vllm-rs 0.1", &theirs, &ours);
        let value = |metric: &str| all.iter().find(|it| it.metric == metric).unwrap().value;
        assert_eq!((value("requests per second"), value("our part of its requests per second")), (5.0, 1.0));
        assert_eq!((value("TTFT p50"), value("TTFT p90"), value("cached prompt tokens")), (2.0, 3.0, 50.0));
        assert_eq!((value("frontend's CPU per request"), value("engines' CPU per request")), (50.0, 100.0));
        assert_eq!((value("compared"), value("different")), (30.0, 0.0));
        let own = summary("all", "chiasm", &ours, &ours);
        assert!(!own.iter().any(|it| it.metric == "compared"));
    }
}

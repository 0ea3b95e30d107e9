//! Frontends with real engines, and engines without a frontend, which get recorded requests.
//!
//! | file | contents |
//! |---|---|
//! | `side` | the frontends |
//! | `replay` | the engines without a frontend |
//! | `transfer` | the transfer of images to engines: shared memory on and off |

mod replay;
mod side;
mod transfer;

use std::cell::Cell;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use peers::flags::Flags;
use peers::numbers::{Zipf, median, quantile};
use peers::row::{Metric, OURS, Row, less, more, neutral};

use crate::client::{Response, Usage};
use crate::load::{self, Answered, SETTLE};
use crate::picture::{self, Format, Picture};
use crate::pieces::Pieces;
use crate::program::GroupCpu;
use crate::workload::{image_request, streaming};

use replay::{Replay, Replayed};
use side::{Inputs, Side};

/// The cases, each with additional flags of all engines.
const CASES: [(&str, &[&str]); 2] =
    [("vLLM's defaults", &[]), ("8192 tokens per step", &["--max-num-batched-tokens", "8192"])];
/// The number of concurrent requests.
const CLIENTS: usize = 8;
const ANSWER_TOKENS: u64 = 16;
const PICTURES: usize = 12;
/// The number of requests in a round.
const REQUESTS: usize = 96;
/// The seed of all requests, so that each run has the same. The number has no meaning.
const SEED: u64 = 20_261_124;
/// The timeout of all answers of a round.
const TIMEOUT: Duration = Duration::from_secs(180);
/// The header with which `chiasm` names the worker that answers.
const WORKER: &str = "x-chiasm-worker";
/// The side without a frontend, which is a limit and not a peer.
const ENGINES_ALONE: &str = "engines alone";

/// Measures all cases and prints the rows.
pub(crate) async fn run(
    flags: &Flags,
    scratch: PathBuf,
    rounds: usize,
) -> Result<(), Box<dyn Error>> {
    Row::for_run("rounds", rounds, OURS).print()?;
    for (number, (case, engine_flags)) in CASES.into_iter().enumerate() {
        eprintln!("{case}");
        let inputs = Inputs::new(flags, engine_flags, scratch.join(number.to_string()))?;
        let mut workload = Workload::new(&flags.path("--pictures")?)?;
        // One after the other: each takes all cores to import modules.
        let replay = Replay::start(&inputs).await?;
        let mut sides = Vec::new();
        for start in [side::chiasm, side::vllm_serve, side::vllm_rs] {
            let mut side = start(&inputs)?;
            side.wait().await?;
            sides.push(side);
        }
        let turns = vec![Vec::new(); sides.len() + 1];
        let mut all = Sides { sides, replay, turns };
        eprintln!("warming up");
        all.round(&workload.each_picture(), 0).await?;
        all.round(&workload.requests(), 0).await?;
        all.turns.iter_mut().for_each(Vec::clear);
        for round in 0..rounds {
            eprintln!("round {} of {rounds}", round + 1);
            all.round(&workload.requests(), round).await?;
        }
        all.print(case)?;
    }
    transfer::run(flags, &scratch, rounds).await
}

/// A generator of requests that are all different. Some pictures are more frequent than others.
struct Workload {
    files: Vec<Picture>,
    /// The files in base64, in two pieces each.
    pictures: Vec<[Bytes; 2]>,
    law: Zipf,
    rng: Rng,
    requests: u64,
}

impl Workload {
    /// Creates a workload from the JPEG files in a folder. If there are fewer files than pictures,
    /// some pictures have the same pixels. Their files differ, so engines compute each.
    fn new(folder: &Path) -> Result<Self, Box<dyn Error>> {
        let files = picture::read(folder, Format::Jpeg)?;
        let files: Vec<Picture> =
            files.iter().map(|file| Picture::new(file)).collect::<Result<_, _>>()?;
        let rng = Rng::with_seed(SEED);
        let mut workload =
            Self { files, pictures: Vec::new(), law: Zipf::new(PICTURES), rng, requests: 0 };
        workload.renew_pictures();
        Ok(workload)
    }

    /// Replaces all pictures by new files.
    fn renew_pictures(&mut self) {
        let numbers = self.requests..self.requests + PICTURES as u64;
        let pictures = self.files.iter().cycle().zip(numbers);
        self.pictures = pictures.map(|(file, number)| file.numbered(number)).collect();
    }

    /// Returns a request for each picture.
    fn each_picture(&mut self) -> Vec<Pieces> {
        (0..PICTURES).map(|picture| self.request(picture)).collect()
    }

    /// Returns the requests of a round.
    fn requests(&mut self) -> Vec<Pieces> {
        self.draw().into_iter().map(|(_, request)| request).collect()
    }

    /// Returns the requests of a round, each with its picture.
    fn draw(&mut self) -> Vec<(usize, Pieces)> {
        let request = |_| {
            let picture = self.law.draw(&mut self.rng);
            (picture, self.request(picture))
        };
        (0..REQUESTS).map(request).collect()
    }

    fn request(&mut self, picture: usize) -> Pieces {
        self.requests += 1;
        let options = format!(r#"{},"temperature":0"#, streaming(ANSWER_TOKENS));
        let data_uri = Format::Jpeg.data_uri();
        image_request(&options, data_uri, [self.pictures[picture].clone()], self.requests)
    }
}

/// The results of a round of a side.
#[derive(Clone)]
struct Turn {
    replayed: Replayed,
    /// The prompt tokens of each request; none for engines alone.
    lengths: Vec<u64>,
    cpu: GroupCpu,
    /// The seconds of CPU time that all other sides took in this time.
    others: f64,
}

impl Turn {
    fn requests_per_second(&self) -> f64 {
        self.replayed.ttft.len() as f64 / self.replayed.wall
    }
}

/// An answer of a frontend.
struct Reply {
    number: usize,
    /// The number of the client, and with that of its address.
    client: usize,
    /// The milliseconds from sending the request to each text.
    times_ms: Vec<f64>,
    usage: Usage,
    /// The number of the worker, from `chiasm` only.
    worker: Option<usize>,
}

/// Sends the requests in their order with concurrent clients. Returns the replies in that order.
async fn send(
    addresses: &[SocketAddr],
    requests: &[Pieces],
    clients: usize,
) -> Result<Answered<Reply>, Box<dyn Error>> {
    let next = &Cell::new(0);
    let clients = (0..clients).map(|client| {
        std::iter::from_fn(move || {
            let number = next.replace(next.get() + 1);
            Some(((number, client), requests.get(number)?.clone()))
        })
    });
    let keep = |(number, client), _, usage: Usage, response: Response| {
        let worker = response.headers.get(WORKER).and_then(|worker| worker.to_str().ok());
        let worker = worker.and_then(|worker| worker.strip_prefix("worker_")?.parse().ok());
        Ok(Reply { number, client, times_ms: response.text_times_ms().collect(), usage, worker })
    };
    let mut answered = load::send(addresses, clients, TIMEOUT, keep).await?;
    answered.results.sort_by_key(|reply| reply.number);
    Ok(answered)
}

/// All sides, ours first, and the turns of each. The last turns are those of engines alone.
struct Sides {
    sides: Vec<Side>,
    replay: Replay,
    turns: Vec<Vec<Turn>>,
}

impl Sides {
    /// Sends the same requests to all sides. Each round begins with another side. Engines alone
    /// follow our side, with the same workers.
    async fn round(&mut self, requests: &[Pieces], round: usize) -> Result<(), Box<dyn Error>> {
        let count = self.sides.len();
        for turn in 0..count {
            let number = (turn + round) % count;
            let before = self.cpu()?;
            let side = &self.sides[number];
            let answered = send(&[side.address], requests, CLIENTS).await;
            let Answered { results: replies, wall, .. } =
                answered.map_err(|error| side.program.failed(&format!("failed: {error}")))?;
            let lengths: Vec<u64> = replies.iter().map(|it| it.usage.prompt_tokens).collect();
            let ttft: Option<Vec<f64>> =
                replies.iter().map(|it| it.times_ms.first().copied()).collect();
            let replayed = Replayed {
                ttft: ttft.ok_or("an answer has no text")?,
                wall: wall.as_secs_f64(),
                prompt_tokens: lengths.iter().sum(),
                cached_tokens: replies.iter().map(|it| it.usage.cached_tokens()).sum(),
                tokens: replies.iter().map(|it| it.usage.completion_tokens).sum(),
            };
            self.add_turn(number, requests.len(), &before, replayed, lengths).await?;
            if number == 0 {
                let workers: Option<Vec<usize>> = replies.iter().map(|it| it.worker).collect();
                let workers = workers.ok_or("an answer does not name its worker")?;
                self.replay.record(requests).await?;
                tokio::time::sleep(SETTLE).await;
                let before = self.cpu()?;
                let replayed = self.replay.replay(CLIENTS, &workers).await?;
                self.add_turn(count, requests.len(), &before, replayed, Vec::new()).await?;
            }
        }
        Ok(())
    }

    /// Adds a turn with the CPU time since `before`.
    async fn add_turn(
        &mut self,
        number: usize,
        requests: usize,
        before: &[GroupCpu],
        replayed: Replayed,
        lengths: Vec<u64>,
    ) -> Result<(), Box<dyn Error>> {
        tokio::time::sleep(SETTLE).await;
        let answers = replayed.ttft.len();
        let tokens = replayed.tokens;
        if answers != requests || tokens != ANSWER_TOKENS * requests as u64 {
            let error = format!("{answers} answers to {requests} requests, with {tokens} tokens");
            return Err(error.into());
        }
        let cpu: Vec<GroupCpu> = self
            .cpu()?
            .iter()
            .zip(before)
            .map(|(now, before)| GroupCpu {
                frontend: now.frontend - before.frontend,
                engines: now.engines - before.engines,
            })
            .collect();
        let others = cpu.iter().enumerate().filter(|&(other, _)| other != number);
        let others = others.map(|(_, cpu)| cpu.frontend + cpu.engines).sum();
        let turn = Turn { replayed, lengths, cpu: cpu[number], others };
        let name = self.sides.get(number).map_or(ENGINES_ALONE, |side| &side.name);
        eprintln!("  {name}: {:.1} requests per second", turn.requests_per_second());
        self.turns[number].push(turn);
        Ok(())
    }

    fn cpu(&self) -> Result<Vec<GroupCpu>, Box<dyn Error>> {
        let programs = self.sides.iter().map(|side| &side.program);
        programs.chain([&self.replay.program]).map(|program| program.group_cpu()).collect()
    }

    /// Prints the rows of a case.
    fn print(&self, case: &str) -> Result<(), Box<dyn Error>> {
        let names = self.sides.iter().map(|side| &*side.name).chain([ENGINES_ALONE]);
        for (name, turns) in names.zip(&self.turns).skip(1) {
            rows(case, name, &self.turns[0], turns).iter().try_for_each(Row::print)?;
        }
        Ok(())
    }
}

/// Returns the rows of our side in comparison with another one.
fn rows(case: &str, name: &str, ours: &[Turn], theirs: &[Turn]) -> Vec<Row> {
    let pairs = || ours.iter().zip(theirs);
    let lengths = pairs().flat_map(|(ours, theirs)| ours.lengths.iter().zip(&theirs.lengths));
    let compared = lengths.clone().count();
    let different = lengths.filter(|(ours, theirs)| ours != theirs).count();
    let equal = (compared > 0).then_some(different == 0);
    let rates =
        pairs().map(|(ours, theirs)| ours.requests_per_second() / theirs.requests_per_second());
    let rate_ratio = median(rates.collect());
    let metrics = metrics(ours).into_iter().zip(metrics(theirs));
    let mut rows: Vec<Row> = metrics
        .map(|((metric, ours), (_, theirs))| metric.row(case, name, ours, theirs))
        .map(|row| {
            // The rates are compared in pairs: the machine's load differs between rounds.
            let is_rate = row.metric == "requests per second";
            Row { equal, ratio: if is_rate { rate_ratio } else { row.ratio }, ..row }
        })
        .filter(|row| name != ENGINES_ALONE || !row.metric.starts_with("frontend's"))
        .collect();
    let lengths = neutral("prompts of another length", "prompts");
    let row = lengths.row(case, name, compared as f64, different as f64);
    rows.extend(equal.map(|equal| Row { equal: Some(equal), ..row }));
    rows
}

/// Returns the metrics of a side over all its turns.
fn metrics(turns: &[Turn]) -> [(Metric, f64); 7] {
    let sum = |number: &dyn Fn(&Turn) -> f64| turns.iter().map(number).sum::<f64>();
    let mut ttft: Vec<f64> = turns.iter().flat_map(|it| &it.replayed.ttft).copied().collect();
    ttft.sort_by(f64::total_cmp);
    let requests = ttft.len() as f64;
    let rate = median(turns.iter().map(Turn::requests_per_second).collect());
    let cached = sum(&|it| it.replayed.cached_tokens as f64);
    let prompts = sum(&|it| it.replayed.prompt_tokens as f64);
    [
        (more("requests per second", "requests/s"), rate),
        (less("TTFT p50", "ms"), quantile(&ttft, 0.5)),
        (less("TTFT p90", "ms"), quantile(&ttft, 0.9)),
        (neutral("cached prompt tokens", "%"), 100.0 * cached / prompts),
        (less("frontend's CPU per request", "ms"), 1e3 * sum(&|it| it.cpu.frontend) / requests),
        (less("engines' CPU per request", "ms"), 1e3 * sum(&|it| it.cpu.engines) / requests),
        (
            neutral("CPU of the other sides", "cores"),
            sum(&|it| it.others) / sum(&|it| it.replayed.wall),
        ),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::collections::BTreeSet;

    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use http_body_util::BodyExt;
    use serde_json::Value;

    use super::*;

    fn turn(ttft: f64, wall: f64) -> Turn {
        let ttft = vec![ttft; 10];
        let replayed = Replayed { ttft, wall, prompt_tokens: 100, cached_tokens: 50, tokens: 0 };
        let cpu = GroupCpu { frontend: 0.5, engines: 1.0 };
        Turn { replayed, lengths: vec![10; 10], cpu, others: 0.0 }
    }

    #[test]
    fn rates_are_compared_round_by_round() {
        let ours = [turn(1.0, 1.0), turn(3.0, 2.0), turn(2.0, 4.0)];
        let theirs = [turn(1.0, 2.0), turn(3.0, 2.0), turn(2.0, 3.0)];
        let all = rows("case", "vllm-rs 0.1", &ours, &theirs);
        let find = |metric: &str| all.iter().find(|it| it.metric == metric).unwrap();
        let rate = find("requests per second");
        assert_eq!((rate.ours, rate.peer, rate.ratio), (5.0, 5.0, 1.0));
        assert_eq!((find("TTFT p50").peer, find("TTFT p90").peer), (2.0, 3.0));
        assert_eq!(find("cached prompt tokens").peer, 50.0);
        assert_eq!(find("frontend's CPU per request").peer, 50.0);
        assert_eq!(find("engines' CPU per request").peer, 100.0);
        let lengths = find("prompts of another length");
        assert_eq!((lengths.ours, lengths.peer, rate.equal), (30.0, 0.0, Some(true)));
        let alone = theirs.map(|turn| Turn { lengths: Vec::new(), ..turn });
        let all = rows("case", ENGINES_ALONE, &ours, &alone);
        assert!(all.iter().all(|it| !it.metric.contains("frontend") && it.equal.is_none()));
    }

    #[tokio::test]
    async fn requests_differ_with_pictures_by_zipf() {
        let dir = tempfile::tempdir().unwrap();
        let file = [&[0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2][..], &[0xff, 0xdb, 0, 3, 9]].concat();
        std::fs::write(dir.path().join("0.jpg"), file).unwrap();
        let mut workload = Workload::new(dir.path()).unwrap();
        let mut requests = workload.each_picture();
        requests.extend((0..10).flat_map(|_| workload.requests()));
        let mut pictures = Vec::new();
        let mut bodies = BTreeSet::new();
        for request in requests {
            let body = request.collect().await.unwrap().to_bytes();
            let json: Value = serde_json::from_slice(&body).unwrap();
            let url = json["messages"][0]["content"][0]["image_url"]["url"].as_str().unwrap();
            pictures
                .push(STANDARD.decode(url.strip_prefix(Format::Jpeg.data_uri()).unwrap()).unwrap());
            assert!(bodies.insert(body));
        }
        let (each, drawn) = pictures.split_at(PICTURES);
        let counts: Vec<usize> =
            each.iter().map(|it| drawn.iter().filter(|drawn| *drawn == it).count()).collect();
        assert_eq!(counts.iter().sum::<usize>(), 10 * REQUESTS);
        // Of 960 draws, 960 / 3.103 are expected for the first picture and a twelfth of that for
        // the last.
        assert!((260..360).contains(&counts[0]) && (10..45).contains(&counts[11]), "{counts:?}");
    }
}

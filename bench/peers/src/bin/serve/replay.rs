//! The engines alone: the example `replay` of `chiasm`, which is told by lines.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use peers::body::Pieces;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::time::timeout;

use crate::client::ask;
use crate::group::Group;
use crate::side::{ARENA_GB, ENGINES, Inputs, RECEIVER_CACHE_GB, with_plugin};
use crate::workload::MODEL;

/// Side of it, which is a limit and no peer.
pub(crate) const NAME: &str = "engines alone";
/// How long it may take for a line.
const PATIENCE: Duration = Duration::from_secs(300);

/// Engines whose requests are recorded before they get them.
pub(crate) struct Replay {
    pub(crate) group: Group,
    address: SocketAddr,
    orders: ChildStdin,
    results: Lines<BufReader<ChildStdout>>,
}

#[derive(Serialize)]
struct Order<'a> {
    clients: usize,
    workers: &'a [usize],
}

/// What came of it.
#[derive(Deserialize)]
pub(crate) struct Replayed {
    /// Milliseconds from sending each request to an engine to its first tokens.
    pub(crate) ttft: Vec<f64>,
    /// Seconds from the first request to the last token.
    pub(crate) wall: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    /// Tokens of all answers.
    pub(crate) tokens: u64,
}

impl Replay {
    /// Starts it and waits until its engines are ready.
    pub(crate) async fn start(inputs: &Inputs) -> Result<Self, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Ready {
            address: SocketAddr,
        }
        eprintln!("starting {NAME}");
        let mut command = with_plugin(&inputs.replay, inputs);
        command.arg("--vllm").arg(&inputs.vllm).arg("--model").arg(&inputs.model);
        command.args(["--served-model-name", MODEL, "--engines", ENGINES, "--receiver-cache-gb", RECEIVER_CACHE_GB]);
        command.args(["--arena-gb", ARENA_GB, "--"]).args(inputs.engine_flags());
        let mut group = Group::start(NAME, &mut command, &inputs.logs, true)?;
        let leader = group.leader();
        let (orders, results) = (leader.stdin.take().ok_or("no pipe")?, leader.stdout.take().ok_or("no pipe")?);
        let orders = ChildStdin::from_std(orders)?;
        let mut results = BufReader::new(ChildStdout::from_std(results)?).lines();
        let Ready { address } = line(&group, &mut results).await?;
        Ok(Self { group, address, orders, results })
    }

    /// Has these requests made ready for engines, one after the other, and kept.
    pub(crate) async fn record(&self, requests: &[Pieces]) -> Result<(), Box<dyn Error>> {
        let recorded = ask(self.address, requests, 1).await;
        recorded.map(drop).map_err(|error| self.group.failed(&format!("was asked: {error}")))
    }

    /// Sends what was recorded to the engines of these workers.
    pub(crate) async fn replay(&mut self, clients: usize, workers: &[usize]) -> Result<Replayed, Box<dyn Error>> {
        let order = serde_json::to_string(&Order { clients, workers })? + "\n";
        self.orders.write_all(order.as_bytes()).await?;
        self.orders.flush().await?;
        line(&self.group, &mut self.results).await
    }
}

/// The next thing that it prints.
async fn line<T: DeserializeOwned>(
    group: &Group,
    results: &mut Lines<BufReader<ChildStdout>>,
) -> Result<T, Box<dyn Error>> {
    let line = timeout(PATIENCE, results.next_line()).await.map_err(|_| group.failed("says nothing"))??;
    let line = line.ok_or_else(|| group.failed("has ended"))?;
    serde_json::from_str(&line).map_err(|error| group.failed(&format!("says {line}: {error}")))
}

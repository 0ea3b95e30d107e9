//! The engines without a frontend: the example `replay` of `chiasm`, which is controlled by lines
//! on its standard input.

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdin, ChildStdout};
use tokio::time::timeout;

use crate::pieces::Pieces;
use crate::program::Program;
use crate::real_engines::side::Inputs;
use crate::real_engines::{ENGINES_ALONE, send};

/// The timeout of a line.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Engines whose requests are recorded before they get them.
pub(crate) struct Replay {
    pub(crate) program: Program,
    address: SocketAddr,
    orders: ChildStdin,
    results: Lines<BufReader<ChildStdout>>,
}

#[derive(Serialize)]
struct Order<'a> {
    clients: usize,
    workers: &'a [usize],
}

/// The results of a replay.
#[derive(Clone, Deserialize)]
pub(crate) struct Replayed {
    /// The milliseconds from sending each request to its first tokens.
    pub(crate) ttft: Vec<f64>,
    /// The seconds from the first request to the last token.
    pub(crate) wall: f64,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    /// The number of tokens of all answers.
    pub(crate) tokens: u64,
}

impl Replay {
    /// Starts the program and waits until its engines are ready.
    pub(crate) async fn start(inputs: &Inputs) -> Result<Self, Box<dyn Error>> {
        #[derive(Deserialize)]
        struct Ready {
            address: SocketAddr,
        }
        eprintln!("starting {ENGINES_ALONE}");
        let mut command = inputs.our_command(&inputs.replay, &["--model"], "--arena-gb");
        command.arg("--").args(inputs.engine_flags());
        let mut program = Program::start_with_pipes(ENGINES_ALONE, &mut command, &inputs.scratch)?;
        let child = &mut program.child;
        let orders = ChildStdin::from_std(child.stdin.take().ok_or("no pipe")?)?;
        let results = ChildStdout::from_std(child.stdout.take().ok_or("no pipe")?)?;
        let mut results = BufReader::new(results).lines();
        let Ready { address } = line(&program, &mut results).await?;
        Ok(Self { program, address, orders, results })
    }

    /// Records the jobs of these requests, one after the other.
    pub(crate) async fn record(&self, requests: &[Pieces]) -> Result<(), Box<dyn Error>> {
        let recorded = send(&[self.address], requests, 1).await;
        recorded.map(drop).map_err(|error| self.program.failed(&format!("failed: {error}")))
    }

    /// Sends the recorded jobs to the engines of these workers.
    pub(crate) async fn replay(
        &mut self,
        clients: usize,
        workers: &[usize],
    ) -> Result<Replayed, Box<dyn Error>> {
        let order = serde_json::to_string(&Order { clients, workers })? + "\n";
        self.orders.write_all(order.as_bytes()).await?;
        self.orders.flush().await?;
        line(&self.program, &mut self.results).await
    }
}

/// Reads the next line of the program.
async fn line<T: DeserializeOwned>(
    program: &Program,
    results: &mut Lines<BufReader<ChildStdout>>,
) -> Result<T, Box<dyn Error>> {
    let line = timeout(TIMEOUT, results.next_line()).await;
    let line = line.map_err(|_| program.failed("prints nothing"))??;
    let line = line.ok_or_else(|| program.failed("has ended"))?;
    serde_json::from_str(&line).map_err(|error| program.failed(&format!("printed {line}: {error}")))
}

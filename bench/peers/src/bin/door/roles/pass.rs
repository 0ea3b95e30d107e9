//! A frontend that only passes messages on: the limit for the time between engines, with sockets of
//! the same kind.

use std::error::Error;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use zeromq::{PullSocket, PushSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::program::{Program, free_address};
use crate::side::Inputs;

/// The size of an engine's message about a computed prompt: the places of 60 blocks, and the
/// engine's load.
const OUTPUT_BYTES: usize = 1_000;
/// The size of a request with a prompt of 1,000 tokens: ids in msgpack of two bytes or more.
const REQUEST_BYTES: usize = 2_200;
/// The pause between two messages. As between sequential requests, the processes go to sleep.
const PAUSE: Duration = Duration::from_millis(2);

/// Sends a request for each output, until it is killed.
pub(crate) async fn serve([outputs, requests]: [SocketAddr; 2]) -> Result<(), Box<dyn Error>> {
    let mut from = PullSocket::new();
    from.bind(&format!("tcp://{outputs}")).await?;
    let mut to = PushSocket::new();
    to.bind(&format!("tcp://{requests}")).await?;
    let request = Bytes::from(vec![0; REQUEST_BYTES]);
    loop {
        from.recv().await?;
        to.send(ZmqMessage::from(request.clone())).await?;
    }
}

/// The engines' sockets to a process that runs [`serve`].
pub(crate) struct Pass {
    to: PushSocket,
    from: PullSocket,
    /// The process ends with this value.
    _program: Program,
}

impl Pass {
    pub(crate) async fn start(inputs: &Inputs) -> Result<Self, Box<dyn Error>> {
        let outputs = free_address()?;
        let requests = free_address()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["pass", "--outputs", &outputs.to_string()]);
        command.args(["--requests", &requests.to_string()]);
        let mut program = Program::start("pass", &mut command, &inputs.scratch)?;
        // The process binds this address last.
        program.wait_for_listener(requests)?;
        let mut to = PushSocket::new();
        to.connect(&format!("tcp://{outputs}")).await?;
        let mut from = PullSocket::new();
        from.connect(&format!("tcp://{requests}")).await?;
        Ok(Self { to, from, _program: program })
    }

    /// Returns the times from sending an output to receiving the request.
    pub(crate) async fn measure(&mut self, count: usize) -> Result<Vec<Duration>, Box<dyn Error>> {
        let output = Bytes::from(vec![0; OUTPUT_BYTES]);
        let mut times = Vec::new();
        for _ in 0..count {
            tokio::time::sleep(PAUSE).await;
            let start = Instant::now();
            self.to.send(ZmqMessage::from(output.clone())).await?;
            self.from.recv().await?;
            times.push(start.elapsed());
        }
        Ok(times)
    }
}

//! A frontend that does nothing but pass on what comes: the limit for the way of a prompt from one
//! engine to another, over sockets of the same kind as engines have.

use std::error::Error;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use peers::programs::free_address;
use zeromq::{PullSocket, PushSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::program::Program;
use crate::side::Inputs;

/// Bytes of what an engine says that has a prompt computed: where it left each of some 60 blocks,
/// and how busy it is.
const OUTPUT: usize = 1_000;
/// Bytes of a request to an engine with a prompt of 1,000 tokens: their ids in msgpack, two bytes
/// or more each.
const REQUEST: usize = 2_200;
/// Between two of them, as between requests that come one after the other: who waits that long has
/// gone to sleep.
const PAUSE: Duration = Duration::from_millis(2);

/// Sends a request on for each output that comes, until it is killed.
pub(crate) async fn serve([outputs, requests]: [SocketAddr; 2]) -> Result<(), Box<dyn Error>> {
    let (mut from, mut to) = (PullSocket::new(), PushSocket::new());
    from.bind(&format!("tcp://{outputs}")).await?;
    to.bind(&format!("tcp://{requests}")).await?;
    let request = Bytes::from(vec![0; REQUEST]);
    loop {
        from.recv().await?;
        to.send(ZmqMessage::from(request.clone())).await?;
    }
}

/// Both engines' ends of such a program.
pub(crate) struct Pass {
    to: PushSocket,
    from: PullSocket,
    /// Ends with this value.
    _program: Program,
}

impl Pass {
    pub(crate) async fn start(inputs: &Inputs) -> Result<Self, Box<dyn Error>> {
        let [outputs, requests] = [free_address()?, free_address()?];
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["pass", "--outputs", &outputs.to_string(), "--requests", &requests.to_string()]);
        let mut program = Program::start("pass", &mut command, &inputs.scratch)?;
        // It binds this one last.
        program.listens(requests)?;
        let (mut to, mut from) = (PushSocket::new(), PullSocket::new());
        to.connect(&format!("tcp://{outputs}")).await?;
        from.connect(&format!("tcp://{requests}")).await?;
        Ok(Self { to, from, _program: program })
    }

    /// The time from when an output is ready to be sent until the request is here, so many times.
    pub(crate) async fn ask(&mut self, times: usize) -> Result<Vec<Duration>, Box<dyn Error>> {
        let (output, mut took) = (Bytes::from(vec![0; OUTPUT]), Vec::new());
        for _ in 0..times {
            tokio::time::sleep(PAUSE).await;
            let start = Instant::now();
            self.to.send(ZmqMessage::from(output.clone())).await?;
            self.from.recv().await?;
            took.push(start.elapsed());
        }
        Ok(took)
    }
}

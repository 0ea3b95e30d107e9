//! A frontend that only relays: for each message of its engine, each client gets the same bytes.
//! Its cost and delay per streamed token are the limit for real frontends.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};
use zeromq::{PullSocket, PushSocket, Socket, SocketRecv, SocketSend};

use crate::client::nanoseconds;
use crate::program::{Program, free_address};
use crate::side::{Counts, Inputs, Side, command};
use crate::workload::{LONG_TOKENS, MODEL};

/// The size of an engine's message for some dozens of streams.
const MESSAGE_BYTES: usize = 4096;
const ID: &str = "chatcmpl-0123456789abcdef0123456789abcdef";

/// Starts two processes of this program: the relay, and a source of messages in place of an engine.
pub(crate) fn start(inputs: &Inputs, steps_per_second: u32) -> Result<Side, Box<dyn Error>> {
    let address = free_address()?;
    let engine = format!("tcp://{}", free_address()?);
    let step_log = inputs.scratch.join("relay.steps");
    let this = std::env::current_exe()?;
    let mut frontend = command(&this);
    frontend.args(["relay", "--listen", &address.to_string(), "--engine", &engine]);
    let mut source = command(&this);
    source.args(["relay-source", "--relay", &engine, "--rate", &steps_per_second.to_string()]);
    source.arg("--step-log").arg(&step_log);
    let frontend = Program::start("relay", &mut frontend, &inputs.scratch)?;
    Ok(Side {
        counts: Counts::Nothing,
        engines: vec![Program::start("relay-source", &mut source, &inputs.scratch)?],
        streams_text_only: true,
        step_log: Some(step_log),
        ..Side::new("null relay", address, String::new(), frontend)
    })
}

/// Sends `rate` messages per second, and writes a step log as a simulated engine does.
pub(crate) async fn send(relay: &str, rate: f64, step_log: &str) -> Result<(), Box<dyn Error>> {
    let mut log = File::create(step_log)?;
    let mut socket = PushSocket::new();
    socket.connect(relay).await?;
    let mut ticks = interval(Duration::from_secs_f64(1.0 / rate));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        log.write_all(&nanoseconds().to_le_bytes())?;
        socket.send(vec![0; MESSAGE_BYTES].into()).await?;
    }
}

/// A client that waits for the tokens of a stream.
struct Stream {
    socket: BufReader<TcpStream>,
    remaining: u64,
    /// Returns the connection at the end of the stream.
    ended: oneshot::Sender<BufReader<TcpStream>>,
}

type Streams = Arc<Mutex<Vec<Stream>>>;

/// Serves until it is killed.
pub(crate) async fn serve(listen: SocketAddr, engine: &str) -> Result<(), Box<dyn Error>> {
    let mut messages = PullSocket::new();
    messages.bind(engine).await?;
    let listener = TcpListener::bind(listen).await?;
    let streams = Streams::default();
    let token = chunk(&event(r#"{"content":" token"}"#));
    let usage = r#"data: {"usage":{"prompt_tokens":1,"completion_tokens":256}}"#;
    let end = chunk(&format!("{usage}\n\ndata: [DONE]\n\n")) + "0\r\n\r\n";
    loop {
        tokio::select! {
            client = listener.accept() => {
                let (socket, _) = client?;
                socket.set_nodelay(true)?;
                let streams = streams.clone();
                // A broken connection fails the client's request.
                tokio::spawn(async move { drop(answer(BufReader::new(socket), &streams).await) });
            }
            message = messages.recv() => {
                message?;
                let mut streams = streams.lock().unwrap_or_else(PoisonError::into_inner);
                for mut stream in std::mem::take(&mut *streams) {
                    // The system's buffers have room for whole answers.
                    if stream.socket.get_ref().try_write(token.as_bytes()).is_err() {
                        continue;
                    }
                    stream.remaining -= 1;
                    if stream.remaining > 0 {
                        streams.push(stream);
                    } else if stream.socket.get_ref().try_write(end.as_bytes()).is_ok() {
                        drop(stream.ended.send(stream.socket));
                    }
                }
            }
        }
    }
}

/// Answers the requests of one connection.
async fn answer(
    mut socket: BufReader<TcpStream>,
    streams: &Streams,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    loop {
        let mut head = String::new();
        let mut length = 0;
        while !head.ends_with("\r\n\r\n") {
            let begin = head.len();
            if socket.read_line(&mut head).await? == 0 {
                return Ok(());
            }
            let line = head[begin..].to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        socket.read_exact(&mut body).await?;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: ";
        if !String::from_utf8_lossy(&body).contains(r#""stream":true"#) {
            let usage = r#"{"prompt_tokens":1,"completion_tokens":1}"#;
            let body = format!(r#"{{"model":"{MODEL}","usage":{usage}}}"#);
            let length = body.len();
            let fields = format!("application/json\r\ncontent-length: {length}\r\n\r\n");
            socket.write_all([head, &fields, &body].concat().as_bytes()).await?;
            continue;
        }
        let fields = "text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let first = chunk(&event(r#"{"role":"assistant","content":""}"#));
        socket.write_all([head, fields, &first].concat().as_bytes()).await?;
        let (ended, end) = oneshot::channel();
        let stream = Stream { socket, remaining: LONG_TOKENS, ended };
        streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        socket = end.await?;
    }
}

/// Returns an event of a stream as Chiasm writes it.
fn event(delta: &str) -> String {
    let object = r#""object":"chat.completion.chunk","created":1800000000"#;
    let choice = format!(r#"{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null}}"#);
    format!("data: {{\"id\":\"{ID}\",{object},\"model\":\"{MODEL}\",\"choices\":[{choice}]}}\n\n")
}

/// Returns a chunk of HTTP/1.1.
fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

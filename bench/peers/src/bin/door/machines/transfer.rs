//! A plain transfer of bytes over TCP without TLS, which is the limit for anything that is sent.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::machines::machine::Machine;
use crate::program::{Program, free_address};
use crate::side::Inputs;

/// Returns the size of the tensors that our binary makes of the picture at this URL.
pub(crate) fn tensor_bytes(inputs: &Inputs, url: &str) -> Result<usize, Box<dyn Error>> {
    #[derive(Deserialize)]
    struct Inspected {
        tensors: Vec<Tensor>,
    }
    #[derive(Deserialize)]
    struct Tensor {
        dtype: String,
        shape: Vec<usize>,
    }
    let mut inspect = Command::new(&inputs.chiasm);
    inspect.args(["inspect", "--json", "--model"]).arg(&inputs.model).arg(url);
    let inspected: Inspected = serde_json::from_slice(&inspect.output()?.stdout)?;
    let mut bytes = 0;
    for Tensor { dtype, shape } in inspected.tensors {
        let size = match &*dtype {
            "uint8" => 1,
            "int64" => 8,
            _ => return Err(format!("a tensor has the type {dtype}").into()),
        };
        bytes += size * shape.iter().product::<usize>();
    }
    Ok(bytes)
}

/// Receives a length and that many bytes into memory that was used before, and answers with one
/// byte. Repeats until it is killed.
pub(crate) fn sink(listen: SocketAddr) -> Result<(), Box<dyn Error>> {
    let mut memory = Vec::new();
    for stream in TcpListener::bind(listen)?.incoming() {
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        let mut length = [0; 8];
        while stream.read_exact(&mut length).is_ok() {
            memory.resize(usize::try_from(u64::from_le_bytes(length))?, 0);
            stream.read_exact(&mut memory)?;
            stream.write_all(&[0])?;
        }
    }
    Ok(())
}

/// A connection to a sink on a machine.
pub(crate) struct Transfer {
    stream: TcpStream,
    /// The sink ends with this value.
    _sink: Program,
}

impl Transfer {
    pub(crate) fn start(inputs: &Inputs, machine: &Machine) -> Result<Self, Box<dyn Error>> {
        let listen = SocketAddr::new(machine.host, free_address()?.port());
        let mut command = machine.command(&std::env::current_exe()?);
        command.args(["sink", "--listen", &listen.to_string()]);
        let name = format!("sink, {}", machine.link);
        let mut sink = Program::start(&name, &mut command, &inputs.scratch)?;
        sink.wait_for_listener(listen)?;
        let stream = TcpStream::connect(listen)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, _sink: sink })
    }

    /// Returns the time from the first byte to the answer.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        self.stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
        self.stream.write_all(bytes)?;
        self.stream.read_exact(&mut [0])?;
        Ok(start.elapsed())
    }
}

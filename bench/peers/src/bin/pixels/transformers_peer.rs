//! The peer `transformers`: a Python process that gets an order for each round.

use std::cell::RefCell;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::side::{Side, Times};

/// An order, see `transformers_peer.py`.
#[derive(Serialize)]
struct Order<'a> {
    model: &'a Path,
    picture: &'a Path,
    format: &'static str,
    tensor: Option<&'a Path>,
}

/// The first line of output.
#[derive(Deserialize)]
struct Versions {
    transformers: String,
    torch: String,
    pillow: String,
}

/// The process, which ends when its input ends.
pub(crate) struct Python {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    name: String,
}

impl Python {
    /// Starts the script and waits until it has imported its modules.
    pub(crate) fn start(python: &Path, script: &Path) -> Result<Self, Box<dyn Error>> {
        let mut command = Command::new(python);
        // -I: ignores packages and settings of the user. -B: leaves no __pycache__.
        command.args(["-I", "-B"]).arg(script).stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn();
        let mut child =
            child.map_err(|error| format!("could not start {}: {error}", python.display()))?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().ok_or("a pipe is missing")?);
        let mut python = Self { child, orders, answers, name: String::new() };
        let Versions { transformers, torch, pillow } = serde_json::from_str(&python.answer()?)?;
        // After the plus sign is the platform of the build.
        let torch = torch.split('+').next().unwrap_or_default();
        python.name = format!("transformers {transformers} (torch {torch}, Pillow {pillow})");
        Ok(python)
    }

    fn send(&mut self, order: &Order<'_>) -> Result<Times, Box<dyn Error>> {
        let orders = self.orders.as_mut().ok_or("a pipe is missing")?;
        writeln!(orders, "{}", serde_json::to_string(order)?)?;
        orders.flush()?;
        Ok(serde_json::from_str(&self.answer()?)?)
    }

    fn answer(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            return Err("the peer transformers ended, see its output above".into());
        }
        Ok(line)
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // The end of its input ends the process, whose status does not matter any more.
        self.orders = None;
        let _ = self.child.wait();
    }
}

pub(crate) struct Transformers<'a> {
    python: Rc<RefCell<Python>>,
    case: &'a Case,
    /// The file in which the process passes tensors.
    tensor: PathBuf,
}

impl<'a> Transformers<'a> {
    pub(crate) fn open(python: Rc<RefCell<Python>>, case: &'a Case, tensor: PathBuf) -> Self {
        Self { python, case, tensor }
    }

    fn send(&self, tensor: Option<&Path>) -> Result<Times, Box<dyn Error>> {
        let Case { format, settings: model, picture, .. } = self.case;
        self.python.borrow_mut().send(&Order { model, picture, format: format.name(), tensor })
    }
}

impl Side for Transformers<'_> {
    fn name(&self) -> String {
        self.python.borrow().name.clone()
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        self.send(None)
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        self.send(Some(&self.tensor))?;
        Ok(Some(std::fs::read(&self.tensor)?))
    }
}

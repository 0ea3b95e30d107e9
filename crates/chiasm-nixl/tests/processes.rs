//! A reader and lenders in processes of their own, over whatever NIXL finds between them and over
//! TCP alone.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_nixl::{Lender, Lent, MOST_ABANDONED, NixlError, NotRead, Reader, Settings};
use rustix::process::{Pid, Signal, kill_process};

const MIB: usize = 1 << 20;
/// What tells a process of this program how many bytes it is to lend.
const LENDS: &str = "CHIASM_NIXL_LENDS";
/// What UCX may use.
const TRANSPORTS: &str = "UCX_TLS";
/// Long enough for a busy machine, and for a MiB or for hundreds.
const WITHIN: Duration = Duration::from_secs(20);

fn settings(pool_bytes: usize, within: Duration) -> Settings {
    let library = std::env::var_os("CHIASM_TEST_NIXL");
    let library =
        library.expect("CHIASM_TEST_NIXL names NIXL's libnixl_capi.so: `cargo xtask test` sets it");
    Settings { library: PathBuf::from(library), pool_bytes, within, devices: Some("lo".to_owned()) }
}

/// What a lender lends: no two parts of it are the same.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(8) as u64)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .take(bytes)
        .collect()
}

/// A process that lends something.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
    told: ChildStdin,
    lent: Lent,
}

impl Process {
    fn lending(bytes: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "what_lends_by_nixl", "--ignored", "--nocapture"])
            .env(LENDS, bytes.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut says, told) =
            (BufReader::new(child.stdout.take().unwrap()), child.stdin.take().unwrap());
        let line = loop {
            let mut line = String::new();
            assert!(says.read_line(&mut line).unwrap() > 0, "it lends nothing");
            // The test harness has begun the line.
            if let Some((_, lends)) = line.split_once("lends ") {
                break lends.to_owned();
            }
        };
        let mut words = line.split_whitespace();
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        let (address, loan) = (number(), number());
        let hex = words.next().unwrap();
        let metadata: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        let lent = Lent {
            metadata: metadata.into(),
            address,
            number: loan,
            bytes: bytes as u64,
            within: WITHIN,
        };
        Self { child, says, told, lent }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Has it end its loan.
    fn end_the_loan(&mut self) {
        writeln!(self.told, "end").unwrap();
        let mut line = String::new();
        self.says.read_line(&mut line).unwrap();
        assert_eq!(line, "ended\n");
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// No test, but the other process of those that are.
#[test]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
fn what_lends_by_nixl() {
    let Ok(bytes) = std::env::var(LENDS) else { return };
    let bytes: usize = bytes.parse().unwrap();
    let lender = Lender::start(&settings(bytes + MIB, WITHIN)).unwrap();
    // In parts of unequal length.
    let mut rest = Bytes::from(pattern(bytes));
    let parts = [rest.split_to(bytes / 3), Bytes::new(), rest];
    let loan = lender.lend(&parts).unwrap();
    assert!(lender.lend(&[pattern(2 * MIB).into()]).is_none(), "there is no more room");
    let hex: String = lender.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("lends {} {} {hex}", loan.address(), loan.number());
    let mut loan = Some(loan);
    for line in std::io::stdin().lines() {
        if line.unwrap() == "end" {
            loan = None;
            assert!(
                lender.lend(&[pattern(bytes).into()]).is_none(),
                "what may be read is not written"
            );
            println!("ended");
        }
    }
    drop(loan);
}

/// Has connections made: what is read is no loan.
async fn connect(reader: &Reader, lent: &Lent) {
    assert!(matches!(read(reader, &Lent { bytes: 1, ..lent.clone() }).await.0, Err(NotRead::Over)));
}

async fn read(reader: &Reader, lent: &Lent) -> (Result<Bytes, NotRead>, Duration) {
    let since = Instant::now();
    let read = reader.read(lent.clone()).await;
    (read, since.elapsed())
}

fn is_the_pattern(read: &[u8]) {
    assert!(read == pattern(read.len()), "other bytes were read");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn what_is_lent_by_nixl_is_read_as_it_is_and_memory_comes_back() {
    let reader = Reader::start(&settings(64 * MIB, WITHIN)).unwrap();
    for bytes in [1, 300_000, 13 * MIB + 5] {
        let lender = Process::lending(bytes);
        let mut times = Vec::new();
        // More than the pool has, one after the other.
        for _ in 0..20 {
            let (read, time) = read(&reader, &lender.lent).await;
            is_the_pattern(&read.unwrap());
            times.push(time);
        }
        let first = times[0];
        times.sort();
        println!(
            "{bytes} bytes: first {first:?}, then {:?} to {:?}, median {:?}",
            times[0], times[19], times[10]
        );
    }
    // At the same time, of two lenders.
    let lenders = [13 * MIB, 9 * MIB].map(Process::lending);
    let (one, other, again) = tokio::join!(
        read(&reader, &lenders[0].lent),
        read(&reader, &lenders[1].lent),
        read(&reader, &lenders[0].lent)
    );
    let all = [one, other, again].map(|(read, _)| read.unwrap());
    all.iter().for_each(|read| is_the_pattern(read));
    // They are held, and there is no room for what would need their memory.
    let large = Process::lending(40 * MIB);
    assert!(matches!(read(&reader, &large.lent).await.0, Err(NotRead::NoRoom(_))));
    drop(all);
    is_the_pattern(&read(&reader, &large.lent).await.0.unwrap());
    assert_eq!(reader.abandoned(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn a_loan_by_nixl_that_is_over_is_not_taken() {
    let reader = Reader::start(&settings(4 * MIB, WITHIN)).unwrap();
    let mut lender = Process::lending(MIB);
    is_the_pattern(&read(&reader, &lender.lent).await.0.unwrap());
    let another = Lent { number: lender.lent.number ^ 1, ..lender.lent.clone() };
    assert!(matches!(read(&reader, &another).await.0, Err(NotRead::Over)));
    lender.end_the_loan();
    assert!(matches!(read(&reader, &lender.lent).await.0, Err(NotRead::Over)));
    let nonsense = Lent { metadata: Bytes::from_static(b"nonsense"), ..lender.lent.clone() };
    assert!(matches!(read(&reader, &nonsense).await.0, Err(NotRead::Failed(_))));
    assert_eq!(reader.abandoned(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn a_lender_by_nixl_that_is_killed_costs_an_error_and_no_memory() {
    const LARGE: usize = 256 * MIB;
    let reader = Reader::start(&settings(LARGE + MIB, WITHIN)).unwrap();
    let mut lender = Process::lending(LARGE);
    connect(&reader, &lender.lent).await;
    let killed = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        lender.signal(Signal::KILL);
    };
    let (reading, ()) = tokio::join!(read(&reader, &lender.lent), killed);
    println!("killed: {:?} after {:?}", reading.0.as_ref().map(Bytes::len), reading.1);
    // All of it may have been there.
    if let Ok(read) = &reading.0 {
        is_the_pattern(read);
    }
    drop(reading);
    lender.child.wait().unwrap();
    let (again, time) = read(&reader, &lender.lent).await;
    println!("again: {:?} after {time:?}", again.as_ref().map(Bytes::len));
    assert!(again.is_err() && time < WITHIN, "{time:?}");
    assert_eq!(reader.abandoned(), 0);
    // It needs all of the pool.
    let another = Process::lending(LARGE);
    is_the_pattern(&read(&reader, &another.lent).await.0.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn what_a_lender_that_is_stopped_was_read_into_by_nixl_is_never_used_again() {
    const LARGE: usize = 256 * MIB;
    const SOON: Duration = Duration::from_secs(1);
    // What is stopped may be read all the same, where NIXL does not need its help.
    let needs_help = std::env::var(TRANSPORTS).is_ok_and(|transports| transports == "tcp");
    let reader = Reader::start(&settings(2 * LARGE + MIB, WITHIN)).unwrap();
    let mut lender = Process::lending(LARGE);
    connect(&reader, &lender.lent).await;
    let hurried = Lent { within: SOON, ..lender.lent.clone() };
    let stopped = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        lender.signal(Signal::STOP);
    };
    let (reading, ()) = tokio::join!(read(&reader, &hurried), stopped);
    println!("stopped: {:?} after {:?}", reading.0.as_ref().map(Bytes::len), reading.1);
    let was_read = reading.0.is_ok();
    match reading.0 {
        Ok(read) => is_the_pattern(&read),
        Err(why) => assert!(
            matches!(why, NotRead::Slow(_)) && reading.1 < SOON * 2,
            "{why} after {:?}",
            reading.1
        ),
    }
    assert!(!(needs_help && was_read), "it was read before it was stopped");
    assert_eq!(reader.abandoned(), usize::from(!was_read));
    if !was_read {
        // Others don't wait as long.
        let (next, time) = read(&reader, &hurried).await;
        assert!(matches!(next, Err(NotRead::Slow(_))) && time < SOON / 2, "{time:?}");
        lender.signal(Signal::CONT);
        // What comes late comes to where nobody is: half of the pool is gone, and what is read into
        // the other half stays as it is.
        let another = Process::lending(LARGE - MIB);
        let kept = read(&reader, &another.lent).await.0.unwrap();
        assert!(matches!(read(&reader, &another.lent).await.0, Err(NotRead::NoRoom(_))));
        is_the_pattern(&kept);
        // The lender has survived what came late, and another reader reads it.
        assert!(lender.is_alive());
        let other_reader = Reader::start(&settings(2 * LARGE, WITHIN)).unwrap();
        is_the_pattern(&read(&other_reader, &lender.lent).await.0.unwrap());
        is_the_pattern(&kept);
    }
    assert!(reader.abandoned() < MOST_ABANDONED && !reader.is_off());
}

#[test]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
fn all_of_it_by_nixl_over_tcp_alone() {
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests
        .args(["--ignored", "--nocapture", "--test-threads=1", "--skip", "over_tcp"])
        .env(TRANSPORTS, "tcp");
    assert!(tests.status().unwrap().success());
}

#[test]
fn a_library_that_is_none_is_told() {
    let library = PathBuf::from("/no/such/libnixl_capi.so");
    let settings = Settings { library, pool_bytes: MIB, within: WITHIN, devices: None };
    for failed in [Reader::start(&settings).map(drop), Lender::start(&settings).map(drop)] {
        let error = failed.unwrap_err();
        assert!(matches!(error, NixlError::Library { .. }), "{error}");
        assert!(
            error.to_string().starts_with("/no/such/libnixl_capi.so is not NIXL's C library"),
            "{error}"
        );
        assert!(error.to_string().contains("No such file"), "{error}");
    }
    // A library without these functions.
    let libc = Settings { library: PathBuf::from("libc.so.6"), ..settings };
    assert!(matches!(Reader::start(&libc).map(drop), Err(NixlError::Library { .. })));
}

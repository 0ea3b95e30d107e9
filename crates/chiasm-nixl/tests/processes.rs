//! Tests of a reader and of lenders in processes of their own, over any transport that NIXL finds
//! and over TCP alone.
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
use chiasm_nixl::{
    Lender, MAX_ABANDONED_READS, NixlError, ReadError, Reader, RemoteLoan, Settings,
};
use rustix::process::{Pid, Signal, kill_process};

const MIB: usize = 1 << 20;
/// The variable that tells a lender process the number of bytes to lend.
const LENT_BYTES: &str = "CHIASM_NIXL_LENDS";
/// The variable with the transports that UCX may use.
const TRANSPORTS: &str = "UCX_TLS";
/// The timeout of reads, enough for hundreds of MiB on a busy machine.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

fn settings(pool_bytes: usize, read_timeout: Duration) -> Settings {
    let library = std::env::var_os("CHIASM_TEST_NIXL");
    let library =
        library.expect("CHIASM_TEST_NIXL names NIXL's libnixl_capi.so: `cargo xtask test` sets it");
    Settings {
        library: PathBuf::from(library),
        pool_bytes,
        read_timeout,
        devices: Some("lo".to_owned()),
    }
}

/// Returns the bytes that lenders lend. No two parts are the same.
fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(8) as u64)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .take(bytes)
        .collect()
}

/// A process with a lender and a loan.
struct LenderProcess {
    child: Child,
    output: BufReader<ChildStdout>,
    input: ChildStdin,
    loan: RemoteLoan,
}

impl LenderProcess {
    /// Starts a process that lends this number of bytes.
    fn start(bytes: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "lender_process_by_nixl", "--ignored", "--nocapture"])
            .env(LENT_BYTES, bytes.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let input = child.stdin.take().unwrap();
        let line = loop {
            let mut line = String::new();
            assert!(output.read_line(&mut line).unwrap() > 0, "the process lends nothing");
            // The test harness may have begun the line.
            if let Some((_, loan)) = line.split_once("lends ") {
                break loan.to_owned();
            }
        };
        let mut words = line.split_whitespace();
        let mut next_number = || words.next().unwrap().parse::<u64>().unwrap();
        let address = next_number();
        let number = next_number();
        let hex = words.next().unwrap();
        let metadata: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        let loan = RemoteLoan {
            metadata: metadata.into(),
            address,
            number,
            bytes: bytes as u64,
            timeout: READ_TIMEOUT,
        };
        Self { child, output, input, loan }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Makes the process end its loan.
    fn end_loan(&mut self) {
        writeln!(self.input, "end").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "ended\n");
    }

    fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for LenderProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lender process of the other tests; not a test by itself.
#[test]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
fn lender_process_by_nixl() {
    let Ok(bytes) = std::env::var(LENT_BYTES) else { return };
    let bytes: usize = bytes.parse().unwrap();
    let lender = Lender::start(&settings(bytes + MIB, READ_TIMEOUT)).unwrap();
    // Lends parts of unequal length.
    let mut rest = Bytes::from(pattern(bytes));
    let parts = [rest.split_to(bytes / 3), Bytes::new(), rest];
    let loan = lender.lend(&parts).unwrap();
    assert!(lender.lend(&[pattern(2 * MIB).into()]).is_none(), "the pool is full");
    let hex: String = lender.metadata().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("lends {} {} {hex}", loan.address(), loan.number());
    let mut loan = Some(loan);
    for line in std::io::stdin().lines() {
        if line.unwrap() == "end" {
            loan = None;
            assert!(
                lender.lend(&[pattern(bytes).into()]).is_none(),
                "memory that may be read is not reused"
            );
            println!("ended");
        }
    }
    drop(loan);
}

/// Establishes connections by a read that is not accepted, because of its wrong length.
async fn connect(reader: &Reader, loan: &RemoteLoan) {
    let (read, _) = read(reader, &RemoteLoan { bytes: 1, ..loan.clone() }).await;
    assert!(matches!(read, Err(ReadError::LoanEnded)));
}

/// Reads a loan. Returns the result and the duration.
async fn read(reader: &Reader, loan: &RemoteLoan) -> (Result<Bytes, ReadError>, Duration) {
    let started = Instant::now();
    let read = reader.read(loan.clone()).await;
    (read, started.elapsed())
}

fn assert_pattern(read: &[u8]) {
    assert!(read == pattern(read.len()), "the read returned wrong bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn lent_bytes_are_read_by_nixl_without_leaking_memory() {
    let reader = Reader::start(&settings(64 * MIB, READ_TIMEOUT)).unwrap();
    for bytes in [1, 300_000, 13 * MIB + 5] {
        let lender = LenderProcess::start(bytes);
        let mut times = Vec::new();
        // More than the pool holds, one after the other.
        for _ in 0..20 {
            let (read, time) = read(&reader, &lender.loan).await;
            assert_pattern(&read.unwrap());
            times.push(time);
        }
        let first = times[0];
        times.sort();
        println!(
            "{bytes} bytes: first {first:?}, then {:?} to {:?}, median {:?}",
            times[0], times[19], times[10]
        );
    }
    // Concurrent reads from two lenders.
    let lenders = [13 * MIB, 9 * MIB].map(LenderProcess::start);
    let (one, other, again) = tokio::join!(
        read(&reader, &lenders[0].loan),
        read(&reader, &lenders[1].loan),
        read(&reader, &lenders[0].loan)
    );
    let all = [one, other, again].map(|(read, _)| read.unwrap());
    all.iter().for_each(|read| assert_pattern(read));
    // The results occupy the pool, so there is no room for a larger read.
    let large = LenderProcess::start(40 * MIB);
    assert!(matches!(read(&reader, &large.loan).await.0, Err(ReadError::NoRoom(_))));
    drop(all);
    assert_pattern(&read(&reader, &large.loan).await.0.unwrap());
    assert_eq!(reader.abandoned_reads(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn ended_loan_by_nixl_is_not_accepted() {
    let reader = Reader::start(&settings(4 * MIB, READ_TIMEOUT)).unwrap();
    let mut lender = LenderProcess::start(MIB);
    assert_pattern(&read(&reader, &lender.loan).await.0.unwrap());
    let another = RemoteLoan { number: lender.loan.number ^ 1, ..lender.loan.clone() };
    assert!(matches!(read(&reader, &another).await.0, Err(ReadError::LoanEnded)));
    lender.end_loan();
    assert!(matches!(read(&reader, &lender.loan).await.0, Err(ReadError::LoanEnded)));
    let invalid = RemoteLoan { metadata: Bytes::from_static(b"nonsense"), ..lender.loan.clone() };
    assert!(matches!(read(&reader, &invalid).await.0, Err(ReadError::Failed(_))));
    assert_eq!(reader.abandoned_reads(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn killed_lender_by_nixl_gives_an_error_without_a_leak() {
    const LARGE: usize = 256 * MIB;
    let reader = Reader::start(&settings(LARGE + MIB, READ_TIMEOUT)).unwrap();
    let mut lender = LenderProcess::start(LARGE);
    connect(&reader, &lender.loan).await;
    let killed = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        lender.signal(Signal::KILL);
    };
    let (reading, ()) = tokio::join!(read(&reader, &lender.loan), killed);
    println!("killed: {:?} after {:?}", reading.0.as_ref().map(Bytes::len), reading.1);
    // The read may have ended before the kill.
    if let Ok(read) = &reading.0 {
        assert_pattern(read);
    }
    drop(reading);
    lender.child.wait().unwrap();
    let (again, time) = read(&reader, &lender.loan).await;
    println!("again: {:?} after {time:?}", again.as_ref().map(Bytes::len));
    assert!(again.is_err() && time < READ_TIMEOUT, "{time:?}");
    assert_eq!(reader.abandoned_reads(), 0);
    // This read needs the whole pool.
    let another = LenderProcess::start(LARGE);
    assert_pattern(&read(&reader, &another.loan).await.0.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
async fn memory_of_timed_out_read_by_nixl_is_never_reused() {
    const LARGE: usize = 256 * MIB;
    const SOON: Duration = Duration::from_secs(1);
    // Some transports can read the memory of a stopped process, without its help.
    let needs_help = std::env::var(TRANSPORTS).is_ok_and(|transports| transports == "tcp");
    let reader = Reader::start(&settings(2 * LARGE + MIB, READ_TIMEOUT)).unwrap();
    let mut lender = LenderProcess::start(LARGE);
    connect(&reader, &lender.loan).await;
    let hurried = RemoteLoan { timeout: SOON, ..lender.loan.clone() };
    let stopped = async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        lender.signal(Signal::STOP);
    };
    let (reading, ()) = tokio::join!(read(&reader, &hurried), stopped);
    println!("stopped: {:?} after {:?}", reading.0.as_ref().map(Bytes::len), reading.1);
    let was_read = reading.0.is_ok();
    match reading.0 {
        Ok(read) => assert_pattern(&read),
        Err(error) => assert!(
            matches!(error, ReadError::TimedOut(_)) && reading.1 < SOON * 2,
            "{error} after {:?}",
            reading.1
        ),
    }
    assert!(!(needs_help && was_read), "the read ended before the stop");
    assert_eq!(reader.abandoned_reads(), usize::from(!was_read));
    if !was_read {
        // The next read fails at once.
        let (next, time) = read(&reader, &hurried).await;
        assert!(matches!(next, Err(ReadError::TimedOut(_))) && time < SOON / 2, "{time:?}");
        lender.signal(Signal::CONT);
        // Late bytes go to memory that is never reused: half of the pool is gone, and reads into
        // the other half stay intact.
        let another = LenderProcess::start(LARGE - MIB);
        let kept = read(&reader, &another.loan).await.0.unwrap();
        assert!(matches!(read(&reader, &another.loan).await.0, Err(ReadError::NoRoom(_))));
        assert_pattern(&kept);
        // The lender has survived the late read, and another reader can read from it.
        assert!(lender.is_alive());
        let other_reader = Reader::start(&settings(2 * LARGE, READ_TIMEOUT)).unwrap();
        assert_pattern(&read(&other_reader, &lender.loan).await.0.unwrap());
        assert_pattern(&kept);
    }
    assert!(reader.abandoned_reads() < MAX_ABANDONED_READS && !reader.is_disabled());
}

#[test]
#[ignore = "needs NIXL: `cargo xtask test` runs it"]
fn other_tests_by_nixl_pass_over_tcp() {
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests
        .args(["--ignored", "--nocapture", "--test-threads=1", "--skip", "over_tcp"])
        .env(TRANSPORTS, "tcp");
    assert!(tests.status().unwrap().success());
}

#[test]
fn invalid_library_is_an_error() {
    let library = PathBuf::from("/no/such/libnixl_capi.so");
    let settings = Settings { library, pool_bytes: MIB, read_timeout: READ_TIMEOUT, devices: None };
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

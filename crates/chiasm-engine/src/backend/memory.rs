//! What one worker's connector has written down of its engine, and what the frontend before it had.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_types::WorkerId;

use super::host::KeptAs;
use crate::client::PendingEngine;
use crate::error::EngineError;
use crate::state::{Launched, Record, RecordFile, StateDir, remove_sockets};
use crate::{ClientOptions, EngineClient, EngineEndpoints, SocketDir};

/// The record of one worker's engine.
pub(super) struct Memory {
    state: StateDir,
    name: KeptAs,
    model: String,
    /// The record that this process has, from the time on when it tells of nobody before it.
    file: OnceLock<RecordFile>,
}

/// Sockets that wait for an engine, and the folder that some of them are in.
pub(super) struct Bound {
    pub(super) pending: PendingEngine,
    pub(super) sockets: SocketDir,
    /// An engine that was ready once may come back here.
    pub(super) may_return: bool,
    /// The engine that is waited for, if a frontend before this one has launched it.
    pub(super) launched: Option<Launched>,
}

impl Memory {
    pub(super) fn new(state: StateDir, name: KeptAs, model: &str) -> Self {
        Self { state, name, model: model.to_owned(), file: OnceLock::new() }
    }

    /// Waits for a record that no other frontend has.
    async fn claim(&self) -> Result<RecordFile, EngineError> {
        match &self.name {
            KeptAs::One(name) => {
                let file = self.state.file(name);
                file.lock().await?;
                Ok(file)
            }
            KeptAs::AnyOf(name) => {
                let (state, name) = (self.state.clone(), name.clone());
                blocking(move || {
                    let mut number = 0_u64;
                    loop {
                        let file = state.file(&format!("{name}-{number}"));
                        if file.try_lock()? {
                            return Ok(file);
                        }
                        number += 1;
                    }
                })
                .await
            }
        }
    }

    /// Listens where the frontend before this one did, if there was one: the first time only. Later
    /// an engine has gone whose frontend this process was itself, and only a new one can come.
    ///
    /// # Errors
    /// The handshake address can't be listened on, or the state folder can't be used.
    pub(super) async fn bind_again(
        &self,
        worker: WorkerId,
        options: &ClientOptions,
    ) -> Result<Option<Bound>, EngineError> {
        if self.file.get().is_some() {
            return Ok(None);
        }
        let file = self.claim().await?;
        let former = {
            let (file, launches) = (file.clone(), matches!(self.name, KeptAs::AnyOf(_)));
            // Nobody knows of an engine that was launched and not written down whether it runs and
            // will come back there.
            let usable =
                move |record: &Record| !record.is_over() && record.launched.is_some() == launches;
            blocking(move || Ok(file.read().filter(usable))).await?
        };
        let bound = match former {
            None => None,
            Some(record) => match bind(&record, &file, options).await {
                Ok(bound) => {
                    if bound.may_return
                        && record.receiver_cache_bytes != options.receiver_cache_bytes
                    {
                        let (was, is) = (record.receiver_cache_bytes, options.receiver_cache_bytes);
                        tracing::warn!(%worker, ?was, ?is, "another size of the receiver cache than before (--receiver-cache-gb)");
                    }
                    Some(bound)
                }
                // Nobody can say hello either, so it is tried again.
                Err(EngineError::Bind { address, source })
                    if address == record.handshake && record.launched.is_none() =>
                {
                    file.unlock();
                    return Err(EngineError::Bind { address, source });
                }
                Err(error) => {
                    tracing::warn!(%worker, %error, "can't listen where the last frontend did; an engine that it left is lost");
                    if let Some(launched) = record.launched {
                        crate::launch::end(launched).await;
                    }
                    None
                }
            },
        };
        let _ = self.file.set(file);
        Ok(bound)
    }

    /// Changes what is written down; `None` is nothing.
    async fn change(
        &self,
        change: impl FnOnce(Option<Record>) -> Option<Record> + Send + 'static,
    ) -> Result<(), EngineError> {
        let Some(file) = self.file.get().cloned() else { return Ok(()) };
        blocking(move || change(file.read()).map_or(Ok(()), |record| file.write(&record))).await
    }

    /// Writes down where an engine is waited for, so that one that is told so can come back to the
    /// next frontend. What is known of an engine before stays if that can come back here, too.
    pub(super) async fn waits(
        &self,
        endpoints: &EngineEndpoints,
        sockets: &SocketDir,
    ) -> Result<(), EngineError> {
        let EngineEndpoints { handshake, input, output } = endpoints;
        let new = Record::new(&self.model, handshake, input, output, sockets.path());
        self.change(move |former| match former {
            Some(former) if former.sockets == new.sockets => {
                Some(Record { frontend: new.frontend, ..former })
            }
            Some(former) => {
                remove_sockets(&former.sockets);
                Some(new)
            }
            None => Some(new),
        })
        .await
    }

    /// Writes down the processes of an engine that outlives this one.
    pub(super) async fn runs(&self, launched: Launched) -> Result<(), EngineError> {
        self.change(move |record| Some(Record { launched: Some(launched), ..record? })).await
    }

    /// Writes down what an engine has said that is ready.
    pub(super) async fn is_ready(
        &self,
        client: &EngineClient,
        options: &ClientOptions,
    ) -> Result<(), EngineError> {
        let (report, version) =
            (Some(client.report().to_vec()), Some(client.info().vllm_version.clone()));
        let (receiver_cache_bytes, adopted) = (options.receiver_cache_bytes, client.is_adopted());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.change(move |record| {
            let record = record?;
            let since = if adopted { record.since } else { now };
            Some(Record { report, vllm_version: version, receiver_cache_bytes, since, ..record })
        })
        .await
    }
}

async fn bind(
    record: &Record,
    file: &RecordFile,
    options: &ClientOptions,
) -> Result<Bound, EngineError> {
    let path = record.sockets.clone();
    let sockets = blocking(move || SocketDir::again(&path)).await?;
    let Record { handshake, input, output, launched, .. } = record.clone();
    let pending =
        EngineClient::bind(EngineEndpoints { handshake, input, output }, options.clone()).await?;
    let pending = match &record.report {
        Some(report) => {
            pending.or_return_of(Bytes::copy_from_slice(report), forget_report(file.clone()))?
        }
        None => pending,
    };
    Ok(Bound { pending, sockets, may_return: record.report.is_some(), launched })
}

async fn forget_report(file: RecordFile) {
    let forgotten = blocking(move || match file.read() {
        Some(record) => file.write(&Record { report: None, ..record }),
        None => Ok(()),
    });
    if let Err(error) = forgotten.await {
        tracing::warn!(%error, "what a former engine has said stays written down");
    }
}

/// Runs what waits for the file system.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime ends, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}

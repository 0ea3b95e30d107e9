//! The record of one worker's engine in the state folder, and taking over the engine of an earlier
//! frontend.

use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use chiasm_types::WorkerId;

use super::host::RecordName;
use crate::client::{PendingEngine, SharedHandshake};
use crate::error::EngineError;
use crate::state::{Launched, Record, RecordFile, StateDir, remove_sockets};
use crate::{ClientOptions, EngineClient, EngineEndpoints, SocketDir};

/// The record of one worker's engine.
pub(super) struct EngineRecord {
    state: StateDir,
    name: RecordName,
    model: String,
    /// The file that this process has locked. Set once the engine of the earlier frontend, if any,
    /// has been read from it.
    file: OnceLock<RecordFile>,
}

/// Sockets that wait for an engine, and the folder of the Unix sockets among them.
pub(super) struct BoundSockets {
    pub(super) pending: PendingEngine,
    pub(super) sockets: SocketDir,
    /// `true` if an engine of an earlier frontend that was ready may reconnect.
    pub(super) may_reconnect: bool,
    /// The processes of that engine, if the earlier frontend launched it.
    pub(super) launched: Option<Launched>,
}

impl EngineRecord {
    pub(super) fn new(state: StateDir, name: RecordName, model: &str) -> Self {
        Self { state, name, model: model.to_owned(), file: OnceLock::new() }
    }

    /// Locks a record file that no other frontend has, and waits for it if necessary.
    async fn claim(&self) -> Result<RecordFile, EngineError> {
        match &self.name {
            RecordName::Exact(name) => {
                let file = self.state.file(name);
                file.lock().await?;
                Ok(file)
            }
            RecordName::Numbered(prefix) => {
                let state = self.state.clone();
                let prefix = prefix.clone();
                blocking(move || {
                    let mut number = 0_u64;
                    loop {
                        let file = state.file(&format!("{prefix}-{number}"));
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

    /// Binds the sockets of the earlier frontend, if there was one. Only the first call does so. At
    /// a later call, this process was itself the frontend of an engine that has died, and only a
    /// new engine can connect.
    ///
    /// # Errors
    /// The frontend can't listen on the handshake address, or the state folder can't be used.
    pub(super) async fn rebind(
        &self,
        worker: WorkerId,
        options: &ClientOptions,
        handshake: Option<&SharedHandshake>,
    ) -> Result<Option<BoundSockets>, EngineError> {
        if self.file.get().is_some() {
            return Ok(None);
        }
        let file = self.claim().await?;
        let former = {
            let file = file.clone();
            let launches = matches!(self.name, RecordName::Numbered(_));
            // A launched engine without recorded processes may have ended, so it is not waited for.
            let usable =
                move |record: &Record| !record.has_ended() && record.launched.is_some() == launches;
            blocking(move || Ok(file.read().filter(usable))).await?
        };
        let bound = match former {
            None => None,
            Some(record) => match bind(&record, &file, options, handshake).await {
                Ok(bound) => {
                    if bound.may_reconnect {
                        warn_if_cache_size_differs(worker, &record, options);
                    }
                    Some(bound)
                }
                // No new engine can send HELLO either, so the caller retries.
                Err(EngineError::Bind { address, source })
                    if address == record.handshake && record.launched.is_none() =>
                {
                    file.unlock();
                    return Err(EngineError::Bind { address, source });
                }
                Err(error) => {
                    tracing::warn!(
                        %worker,
                        %error,
                        "can't listen on the addresses of the last frontend; its engine is lost"
                    );
                    if let Some(launched) = record.launched {
                        crate::launch::terminate(launched).await;
                    }
                    None
                }
            },
        };
        let _ = self.file.set(file);
        Ok(bound)
    }

    /// Replaces the record by the result of `update`, unless that is `None`.
    async fn update(
        &self,
        update: impl FnOnce(Option<Record>) -> Option<Record> + Send + 'static,
    ) -> Result<(), EngineError> {
        let Some(file) = self.file.get().cloned() else { return Ok(()) };
        blocking(move || update(file.read()).map_or(Ok(()), |record| file.write(&record))).await
    }

    /// Stores the addresses for the next engine, so that it can reconnect to a later frontend.
    /// Keeps the record of an earlier engine if that can still connect to these addresses.
    pub(super) async fn store_endpoints(
        &self,
        endpoints: &EngineEndpoints,
        sockets: &SocketDir,
    ) -> Result<(), EngineError> {
        let EngineEndpoints { handshake, input, output } = endpoints;
        let new = Record::new(&self.model, handshake, input, output, sockets.path());
        self.update(move |former| match former {
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

    /// Stores the processes of an engine that outlives this process.
    pub(super) async fn store_processes(&self, launched: Launched) -> Result<(), EngineError> {
        self.update(move |record| Some(Record { launched: Some(launched), ..record? })).await
    }

    /// Stores the report of an engine that is ready.
    pub(super) async fn store_report(
        &self,
        client: &EngineClient,
        options: &ClientOptions,
    ) -> Result<(), EngineError> {
        let report = Some(client.report().to_vec());
        let vllm_version = Some(client.info().vllm_version.clone());
        let receiver_cache_bytes = options.receiver_cache_bytes;
        let adopted = client.is_adopted();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.update(move |record| {
            let record = record?;
            let since = if adopted { record.since } else { now };
            Some(Record { report, vllm_version, receiver_cache_bytes, since, ..record })
        })
        .await
    }
}

fn warn_if_cache_size_differs(worker: WorkerId, record: &Record, options: &ClientOptions) {
    let was = record.receiver_cache_bytes;
    let is = options.receiver_cache_bytes;
    if was != is {
        tracing::warn!(
            %worker,
            ?was,
            ?is,
            "the receiver cache has another size than before (--receiver-cache-gb)"
        );
    }
}

/// Binds the sockets of a record.
async fn bind(
    record: &Record,
    file: &RecordFile,
    options: &ClientOptions,
    shared: Option<&SharedHandshake>,
) -> Result<BoundSockets, EngineError> {
    let path = record.sockets.clone();
    let sockets = blocking(move || SocketDir::reopen(&path)).await?;
    let Record { handshake, input, output, launched, .. } = record.clone();
    let endpoints = EngineEndpoints { handshake, input, output };
    let pending = EngineClient::bind_shared(endpoints, options.clone(), shared).await?;
    let pending = match &record.report {
        Some(report) => {
            pending.or_adopt(Bytes::copy_from_slice(report), forget_report(file.clone()))?
        }
        None => pending,
    };
    Ok(BoundSockets { pending, sockets, may_reconnect: record.report.is_some(), launched })
}

/// Removes the report from a record, because its engine is not used.
async fn forget_report(file: RecordFile) {
    let forgotten = blocking(move || match file.read() {
        Some(record) => file.write(&Record { report: None, ..record }),
        None => Ok(()),
    });
    if let Err(error) = forgotten.await {
        tracing::warn!(%error, "can't remove the report of an earlier engine from its record");
    }
}

/// Runs blocking file operations on a thread for them.
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

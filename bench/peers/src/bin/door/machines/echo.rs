//! An empty gRPC call between processes with the certificates of frontends and agents.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::path::Path;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::machines::certificates::{self, Certificates};
use crate::machines::machine::Machine;
use crate::program::{Program, free_address};
use crate::side::Inputs;

const CALL: &str = "/null.Null/Call";

/// Serves until it is killed.
pub(crate) async fn serve(listen: SocketAddr, certificates: &Path) -> Result<(), Box<dyn Error>> {
    let [authority, certificate, key] = certificates::read(certificates)?;
    let tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
    let tls = tls.client_ca_root(Certificate::from_pem(authority));
    Ok(Server::builder().tls_config(tls)?.add_service(NullService).serve(listen).await?)
}

#[derive(Clone)]
struct NullService;

impl NamedService for NullService {
    const NAME: &'static str = "null.Null";
}

impl Service<HttpRequest<Body>> for NullService {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        Box::pin(async move {
            let mut server = tonic::server::Grpc::new(ProstCodec::default());
            Ok(server.unary(NullCall, request).await)
        })
    }
}

struct NullCall;

impl UnaryService<()> for NullCall {
    type Response = ();
    type Future = Ready<Result<Response<()>, Status>>;

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

/// A connection to a server on a machine.
pub(crate) struct Echo {
    client: Grpc<Channel>,
    /// The server ends with this value.
    _server: Program,
}

impl Echo {
    pub(crate) async fn start(
        inputs: &Inputs,
        machine: &Machine,
        certificates: &Certificates,
    ) -> Result<Self, Box<dyn Error>> {
        let listen = SocketAddr::new(machine.host, free_address()?.port());
        let mut command = machine.command(&std::env::current_exe()?);
        command.args(["echo", "--listen", &listen.to_string()]);
        command.arg("--certificates").arg(&certificates.folder);
        let name = format!("echo, {}", machine.link);
        let mut server = Program::start(&name, &mut command, &inputs.scratch)?;
        server.wait_for_listener(listen)?;
        let [authority, certificate, key] = certificates::read(&certificates.folder)?;
        let tls = ClientTlsConfig::new().identity(Identity::from_pem(certificate, key));
        let tls = tls.ca_certificate(Certificate::from_pem(authority));
        let tls = tls.domain_name(machine.host.to_string());
        let endpoint = Endpoint::from_shared(format!("https://{listen}"))?.tls_config(tls)?;
        Ok(Self { client: Grpc::new(endpoint.connect().await?), _server: server })
    }

    /// Calls the server for `time`, one call after the other. Returns the time of each call.
    pub(crate) async fn call(&mut self, time: Duration) -> Result<Vec<Duration>, Box<dyn Error>> {
        let mut times = Vec::new();
        let begin = Instant::now();
        while begin.elapsed() < time {
            let start = Instant::now();
            self.client.ready().await?;
            let codec = ProstCodec::<(), ()>::default();
            let path = PathAndQuery::from_static(CALL);
            self.client.unary(Request::new(()), path, codec).await?;
            times.push(start.elapsed());
        }
        Ok(times)
    }
}

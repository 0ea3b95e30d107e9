//! A call over gRPC that carries nothing and does nothing, between processes with the certificates
//! that frontends and agents have.

use std::convert::Infallible;
use std::error::Error;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::path::Path;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use peers::programs::free_address;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::codegen::{BoxFuture, Service};
use tonic::server::{NamedService, UnaryService};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::machines::certificates::{self, Certificates};
use crate::machines::machine::Machine;
use crate::program::Program;
use crate::side::Inputs;

const NAME: &str = "null.Null";
const CALL: &str = "/null.Null/Call";

/// Serves until it is killed.
pub(crate) async fn serve(listen: SocketAddr, certificates: &Path) -> Result<(), Box<dyn Error>> {
    let [authority, certificate, key] = certificates::read(certificates)?;
    let tls = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
    let tls = tls.client_ca_root(Certificate::from_pem(authority));
    Ok(Server::builder().tls_config(tls)?.add_service(Null).serve(listen).await?)
}

#[derive(Clone)]
struct Null;

impl NamedService for Null {
    const NAME: &'static str = NAME;
}

impl Service<HttpRequest<Body>> for Null {
    type Response = HttpResponse<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest<Body>) -> Self::Future {
        Box::pin(async move { Ok(tonic::server::Grpc::new(ProstCodec::default()).unary(Call, request).await) })
    }
}

struct Call;

impl UnaryService<()> for Call {
    type Response = ();
    type Future = Ready<Result<Response<()>, Status>>;

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(Response::new(())))
    }
}

/// A connection to such a server on a machine.
pub(crate) struct Echo {
    client: Grpc<Channel>,
    /// Ends with this value.
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
        command.args(["echo", "--listen", &listen.to_string(), "--certificates"]).arg(&certificates.folder);
        let mut server = Program::start(&format!("echo, {}", machine.link), &mut command, &inputs.scratch)?;
        server.listens(listen)?;
        let [authority, certificate, key] = certificates::read(&certificates.folder)?;
        let tls = ClientTlsConfig::new().identity(Identity::from_pem(certificate, key));
        let tls = tls.ca_certificate(Certificate::from_pem(authority)).domain_name(machine.host.to_string());
        let channel = Endpoint::from_shared(format!("https://{listen}"))?.tls_config(tls)?.connect().await?;
        Ok(Self { client: Grpc::new(channel), _server: server })
    }

    /// How long each of the calls took that one after the other could be made in `time`.
    pub(crate) async fn ask(&mut self, time: Duration) -> Result<Vec<Duration>, Box<dyn Error>> {
        let (begin, mut times) = (Instant::now(), Vec::new());
        while begin.elapsed() < time {
            let start = Instant::now();
            self.client.ready().await?;
            let codec = ProstCodec::<(), ()>::default();
            self.client.unary(Request::new(()), PathAndQuery::from_static(CALL), codec).await?;
            times.push(start.elapsed());
        }
        Ok(times)
    }
}

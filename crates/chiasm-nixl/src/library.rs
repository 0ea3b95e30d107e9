//! The functions of NIXL's C interface that are used here, and a session of its library: all unsafe
//! code of this crate.
//!
//! The signatures are those of `wrapper.h` of `nixl-sys` 1.5.2, which the libraries in NIXL's
//! wheels of 1.5.1 export. What the functions want and give are opaque pointers, numbers and
//! strings that end with a zero; they catch C++'s exceptions themselves.

use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use libloading::Library;

use crate::NixlError;
use crate::pool::{Piece, Pool};

type Handle = *mut c_void;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// Memory of the CPU.
const DRAM: c_int = 0;
const READ: c_int = 0;

/// What NIXL has by default, but that its thread sleeps where it would look without a pause: it is
/// woken by what comes from other machines.
const CONFIG: Config = Config {
    enable_prog_thread: true,
    enable_listen_thread: false,
    listen_port: 0,
    thread_sync: 0,
    num_workers: 1,
    pthr_delay_us: 100_000,
    lthr_delay_us: 100_000,
    capture_telemetry: false,
};

/// `nixl_capi_agent_config_s`.
#[repr(C)]
struct Config {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    num_workers: c_uint,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

/// The backend that moves the bytes.
const BACKEND: &CStr = c"UCX";

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*);)*) => {
        /// The library's functions. Each gives 0, or what went wrong as a negative number.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Whether this is a library that does nothing, made to be linked with.
            is_stub: unsafe extern "C" fn() -> bool,
        }

        impl Functions {
            fn find(library: &'static Library) -> Result<Self, libloading::Error> {
                // SAFETY: these are the signatures of the C interface by these names. The library
                // is never unloaded, so the functions are there for as long as the process.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", stringify!($name)))?,)*
                        is_stub: *library.get("nixl_capi_is_stub")?,
                    })
                }
            }
        }
    };
}

functions! {
    create_configured_agent: fn(*const c_char, *const Config, *mut Handle);
    create_params: fn(*mut Handle);
    params_add: fn(Handle, *const c_char, *const c_char);
    destroy_params: fn(Handle);
    create_backend: fn(Handle, *const c_char, Handle, *mut Handle);
    create_reg_dlist: fn(c_int, *mut Handle);
    reg_dlist_add_desc: fn(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist: fn(Handle);
    register_mem: fn(Handle, Handle, Handle);
    get_local_md: fn(Handle, *mut *mut c_void, *mut usize);
    load_remote_md: fn(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md: fn(Handle, *const c_char);
    create_xfer_dlist: fn(c_int, *mut Handle);
    xfer_dlist_add_desc: fn(Handle, usize, usize, u64);
    destroy_xfer_dlist: fn(Handle);
    create_xfer_req: fn(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req: fn(Handle, Handle, Handle);
    get_xfer_status: fn(Handle, Handle);
    release_xfer_req: fn(Handle, Handle);
    destroy_xfer_req: fn(Handle);
}

unsafe extern "C" {
    /// Of the C library: what the functions above allocate is freed so.
    fn free(memory: *mut c_void);
}

/// What NIXL calls an agent, with the memory that it may read into or that others may read: one end
/// of readings. It is never destroyed, and its memory is never unmapped: others may read it at any
/// time, and over TCP the process that is read dies of memory that is gone.
///
/// Its calls come from one thread at a time, as each wants it alone.
pub(crate) struct Session {
    functions: Functions,
    agent: NonNull<c_void>,
}

// SAFETY: the library's objects belong to no thread. NIXL does not synchronise calls of several
// threads, which `&mut self` rules out.
unsafe impl Send for Session {}

/// A reading that was begun.
///
/// While one is under way its bytes are the library's. One that is dropped gives neither them nor
/// the library's object back, as the library has no way to end a reading for sure: what comes late
/// is written into memory that nobody else ever has.
pub(crate) struct Reading {
    request: NonNull<c_void>,
    into: ManuallyDrop<Piece>,
}

// SAFETY: as for sessions; a reading alone can do nothing.
unsafe impl Send for Reading {}

impl Reading {
    /// Leaves a reading to itself whose end nobody waits for. Its memory is never used again.
    pub(crate) fn abandon(self) {}
}

impl Session {
    /// Opens the library, which stays for as long as the process, and makes a pool of its memory.
    /// `devices` are those that UCX may use, as in its `UCX_NET_DEVICES`.
    pub(crate) fn open(
        library: &Path,
        name: &str,
        devices: Option<&str>,
        pool: &Pool,
    ) -> Result<Self, NixlError> {
        let unusable = |error: libloading::Error| {
            let why = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            NixlError::Library { path: library.to_owned(), why }
        };
        // SAFETY: loading runs code of a library that the operator names, and trusts as he does
        // this program.
        let opened = unsafe { Library::new(library) }.map_err(unusable)?;
        // Its threads run on, and so does its code.
        let opened: &'static Library = Box::leak(Box::new(opened));
        let functions = Functions::find(opened).map_err(unusable)?;
        // SAFETY: it wants nothing.
        if unsafe { (functions.is_stub)() } {
            return Err(NixlError::Stub { path: library.to_owned() });
        }
        let mut agent = null_mut();
        let name = c_string(name)?;
        // SAFETY: a string that ends with a zero and a structure, both copied, and a place for a
        // pointer.
        let created =
            unsafe { (functions.create_configured_agent)(name.as_ptr(), &CONFIG, &mut agent) };
        check("create_configured_agent", created)?;
        let agent = NonNull::new(agent)
            .ok_or(NixlError::Failed { call: "create_configured_agent", code: SUCCESS })?;
        let session = Self { functions, agent };
        session.create_backend(devices)?;
        session.register(pool)?;
        Ok(session)
    }

    fn create_backend(&self, devices: Option<&str>) -> Result<(), NixlError> {
        let Functions { create_params, params_add, destroy_params, create_backend, .. } =
            &self.functions;
        let (mut params, mut backend) = (null_mut(), null_mut());
        // Unless the variable says something else, which is before it.
        let devices =
            devices.map(|devices| c_string(&format!("NET_DEVICES={devices}"))).transpose()?;
        // SAFETY: `params` is what was just created, and nobody has it afterwards; strings end with
        // a zero and are copied; the rest are places for pointers. The backend lives as long as the
        // agent, so nobody keeps its pointer.
        unsafe {
            check("create_params", create_params(&mut params))?;
            let added = devices.map_or(SUCCESS, |devices| {
                params_add(params, c"engine_config".as_ptr(), devices.as_ptr())
            });
            let created = match added {
                SUCCESS => {
                    create_backend(self.agent.as_ptr(), BACKEND.as_ptr(), params, &mut backend)
                }
                failed => failed,
            };
            destroy_params(params);
            check("create_backend", created)
        }
    }

    fn register(&self, pool: &Pool) -> Result<(), NixlError> {
        let Functions {
            create_reg_dlist, reg_dlist_add_desc, destroy_reg_dlist, register_mem, ..
        } = &self.functions;
        let (address, length) = pool.extent();
        let mut list = null_mut();
        // SAFETY: the list is what was just created, and nobody has it afterwards. The memory stays
        // where it is for as long as the process, as pools do.
        unsafe {
            check("create_reg_dlist", create_reg_dlist(DRAM, &mut list))?;
            let registered = match reg_dlist_add_desc(list, address, length, 0, std::ptr::null(), 0)
            {
                SUCCESS => register_mem(self.agent.as_ptr(), list, null_mut()),
                failed => failed,
            };
            destroy_reg_dlist(list);
            check("register_mem", registered)
        }
    }

    /// What another session needs to read this one's memory.
    pub(crate) fn metadata(&mut self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut length) = (null_mut(), 0);
        // SAFETY: places for a pointer and a length. What is given are that many bytes from malloc,
        // which nobody else has.
        unsafe {
            check(
                "get_local_md",
                (self.functions.get_local_md)(self.agent.as_ptr(), &mut data, &mut length),
            )?;
            let copy = match data.is_null() {
                true => Vec::new(),
                false => std::slice::from_raw_parts(data.cast::<u8>(), length).to_vec(),
            };
            free(data);
            Ok(copy)
        }
    }

    /// Takes in what another session has said of itself. Its name, for the other calls.
    pub(crate) fn load(&mut self, metadata: &[u8]) -> Result<CString, NixlError> {
        let mut name = null_mut();
        // SAFETY: the bytes are copied. The name is a string from malloc, which nobody else has.
        unsafe {
            let (bytes, length) = (metadata.as_ptr().cast(), metadata.len());
            check(
                "load_remote_md",
                (self.functions.load_remote_md)(self.agent.as_ptr(), bytes, length, &mut name),
            )?;
            let copy = match name.is_null() {
                true => CString::default(),
                false => CStr::from_ptr(name).to_owned(),
            };
            free(name.cast());
            Ok(copy)
        }
    }

    /// Forgets what another session has said of itself, and the connections to it.
    pub(crate) fn forget(&mut self, name: &CStr) -> Result<(), NixlError> {
        // SAFETY: a string that ends with a zero and is copied.
        let forgotten =
            unsafe { (self.functions.invalidate_remote_md)(self.agent.as_ptr(), name.as_ptr()) };
        check("invalidate_remote_md", forgotten)
    }

    /// Begins to read as many bytes as a piece of this session's pool has, from an address in the
    /// memory of another session.
    pub(crate) fn read(
        &mut self,
        mut into: Piece,
        name: &CStr,
        address: u64,
    ) -> Result<Reading, NixlError> {
        let Functions { create_xfer_req, post_xfer_req, .. } = &self.functions;
        let (to, length) = (into.as_mut().as_mut_ptr() as usize, into.as_ref().len());
        let from = usize::try_from(address).map_err(|_| NixlError::Address(address))?;
        let (local, remote) = (self.place(to, length)?, self.place(from, length)?);
        let mut request = null_mut();
        // SAFETY: the places live until after the call, which copies them, as it does the name.
        let created = unsafe {
            let (agent, name) = (self.agent.as_ptr(), name.as_ptr());
            create_xfer_req(agent, READ, local.list, remote.list, name, &mut request, null_mut())
        };
        drop((local, remote));
        check("create_xfer_req", created)?;
        let request = NonNull::new(request)
            .ok_or(NixlError::Failed { call: "create_xfer_req", code: SUCCESS })?;
        let reading = Reading { request, into: ManuallyDrop::new(into) };
        // SAFETY: the request was just created. Its piece is registered, as it is of the pool that
        // was, and nobody but the library touches it until the reading has ended, or ever: see
        // `Reading`.
        match unsafe { post_xfer_req(self.agent.as_ptr(), request.as_ptr(), null_mut()) } {
            SUCCESS | IN_PROGRESS => Ok(reading),
            code => match self.end(reading) {
                Some(_) => Err(NixlError::Failed { call: "post_xfer_req", code }),
                None => Err(NixlError::Kept),
            },
        }
    }

    /// A list of one place.
    fn place(&self, address: usize, length: usize) -> Result<Place<'_>, NixlError> {
        let mut list = null_mut();
        // SAFETY: a place for a pointer.
        check("create_xfer_dlist", unsafe { (self.functions.create_xfer_dlist)(DRAM, &mut list) })?;
        let place = Place { list, functions: &self.functions };
        // SAFETY: the list was just created.
        check("xfer_dlist_add_desc", unsafe {
            (self.functions.xfer_dlist_add_desc)(list, address, length, 0)
        })?;
        Ok(place)
    }

    /// Whether a reading has come to its end. An error is its end too.
    pub(crate) fn has_ended(&mut self, reading: &Reading) -> Result<bool, NixlError> {
        // SAFETY: the request was created by this session and is there for as long as its reading.
        match unsafe {
            (self.functions.get_xfer_status)(self.agent.as_ptr(), reading.request.as_ptr())
        } {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(NixlError::Failed { call: "get_xfer_status", code }),
        }
    }

    /// Gives back the memory of a reading that has come to its end; `None` if the library does not
    /// let go of it, so that nobody may have it ever again.
    pub(crate) fn end(&mut self, reading: Reading) -> Option<Piece> {
        // SAFETY: as above. A request that was released is not used afterwards but to destroy what
        // held it, as the interface wants.
        let released = unsafe {
            (self.functions.release_xfer_req)(self.agent.as_ptr(), reading.request.as_ptr())
        };
        if released != SUCCESS {
            return None;
        }
        // SAFETY: it was released, and nobody has it afterwards: the reading ends here.
        unsafe { (self.functions.destroy_xfer_req)(reading.request.as_ptr()) };
        Some(ManuallyDrop::into_inner(reading.into))
    }
}

/// A list of one place, destroyed on drop.
struct Place<'a> {
    list: Handle,
    functions: &'a Functions,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created by this library, and nobody has it afterwards.
        unsafe { (self.functions.destroy_xfer_dlist)(self.list) };
    }
}

fn check(call: &'static str, code: c_int) -> Result<(), NixlError> {
    if code == SUCCESS { Ok(()) } else { Err(NixlError::Failed { call, code }) }
}

fn c_string(text: &str) -> Result<CString, NixlError> {
    CString::new(text).map_err(|_| NixlError::Text(text.to_owned()))
}

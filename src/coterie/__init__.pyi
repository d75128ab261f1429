from coterie.data.arrays import from_arrays as from_arrays
from coterie.data.arrays import from_dataset as from_dataset
from coterie.data.arrays import from_datasets as from_datasets
from coterie.data.build import DataConfig as DataConfig
from coterie.data.build import build_federation as build_federation
from coterie.data.federation import Federation as Federation
from coterie.data.federation import TestSet as TestSet
from coterie.data.federation import Truth as Truth
from coterie.engine.task import LocalTraining as LocalTraining
from coterie.engine.task import Task as Task
from coterie.errors import CoterieError as CoterieError
from coterie.exchange.base import Exchange as Exchange
from coterie.exchange.base import Inbox as Inbox
from coterie.exchange.base import Message as Message
from coterie.exchange.faulty import Faulty as Faulty
from coterie.exchange.in_memory import InMemory as InMemory
from coterie.methods import *
from coterie.methods import METHODS as METHODS
from coterie.methods.base import Method as Method
from coterie.methods.base import PeerMethod as PeerMethod
from coterie.methods.base import Round as Round
from coterie.methods.base import State as State
from coterie.papers.figures import plot as plot
from coterie.report.page import write_report as write_report
from coterie.rng import Rng as Rng
from coterie.simulation.run import Run as Run
from coterie.simulation.run import simulate as simulate
from coterie.simulation.settings import Settings as Settings
from coterie.studies.config import load_study as load_study
from coterie.studies.definition import StudyConfig as StudyConfig
from coterie.studies.definition import make_study as make_study
from coterie.studies.run import Study as Study
from coterie.studies.run import resume_study as resume_study
from coterie.studies.run import run_study as run_study
from coterie.studies.sweep import run_sweep as run_sweep

__version__: str
